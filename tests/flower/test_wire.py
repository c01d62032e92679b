"""Between fedhb's arrays and Flower's records."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from fedhb.flower.wire import to_arrays, to_config, to_record


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_arrays_come_back_to_the_bit(dtype):
    arrays = {"m": torch.arange(6).view(2, 3).to(dtype).T, "one": torch.tensor(1).to(dtype)}
    back = to_arrays(to_record(arrays))
    assert back.keys() == arrays.keys()
    for key, value in arrays.items():
        assert back[key].dtype == dtype and torch.equal(back[key], value)


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"\x80\x04}.", b"{}"])
def test_bytes_that_are_no_array_are_a_value_error(data):
    """A pickle too: it is never loaded."""
    record = ArrayRecord(
        {"m": Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=data)}
    )
    with pytest.raises(ValueError):
        to_arrays(record)


def test_small_values_stay_and_others_are_json():
    config = to_config({"rounds": 3, "lr": 0.1, "name": "niw", "done": True, "ids": [1, 2]})
    assert dict(config) == {
        "rounds": 3,
        "lr": 0.1,
        "name": "niw",
        "done": True,
        "ids": json.dumps([1, 2]),
    }
