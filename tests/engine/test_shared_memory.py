"""Arrays in memory that a process shares with those it forks."""

from __future__ import annotations

import os

import pytest
import torch

from fedhb.engine.shared_memory import ALIGN, Shelf, size

ARRAYS = {
    "m": torch.arange(5.0),
    "counts": torch.tensor([[1, 2], [3, 4]]),
    "one": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
}


def test_arrays_come_back_with_their_types_and_shapes():
    shelf = Shelf(size(ARRAYS))
    taken = shelf.get(shelf.put(ARRAYS))
    assert taken.keys() == ARRAYS.keys()
    for key, value in ARRAYS.items():
        assert taken[key].dtype == value.dtype and torch.equal(taken[key], value)


def test_every_array_takes_whole_lines_of_the_cache():
    assert size(ARRAYS) == 3 * ALIGN
    assert size({"m": torch.zeros(ALIGN // 4 + 1)}) == 2 * ALIGN


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError):
        Shelf(ALIGN).put({"m": torch.zeros(ALIGN)})


def test_what_is_taken_changes_with_what_is_put_next():
    shelf = Shelf(ALIGN)
    taken = shelf.get(shelf.put({"m": torch.zeros(3)}))["m"]
    shelf.put({"m": torch.ones(3)})
    assert taken.tolist() == [1.0, 1.0, 1.0]


def test_a_forked_process_writes_where_this_one_reads():
    shelf = Shelf(ALIGN)
    labels = shelf.put({"m": torch.zeros(3)})
    child = os.fork()
    if child == 0:
        shelf.get(labels)["m"].fill_(7.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert shelf.get(labels)["m"].tolist() == [7.0, 7.0, 7.0]
