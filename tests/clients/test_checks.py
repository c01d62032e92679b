"""Checks of the data that clients are made from: errors and warnings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fedhb.clients.clients import Clients
from fedhb.errors import InputError

NAN = np.array([[1.0, 2.0], [np.nan, 0.0]])


X, Y = np.zeros((2, 2)), np.zeros(2, int)


@pytest.mark.parametrize(
    ("train", "test", "classes", "says"),
    [
        ([], None, None, "no clients"),
        ([(X, Y)], [], None, "1 .*training.* 0 .*test"),
        ([(X, Y), (X, Y[:1])], None, None, "client 1 .*2 .*1 "),
        (
            [(X, Y), (np.zeros((2, 3)), Y)],
            None,
            None,
            r"client 1 .*\(3,\).*\(2,\)",
        ),
        (
            [(X, Y)],
            [(np.zeros((2, 3)), Y)],
            None,
            r"\(3,\).*\(2,\)",
        ),
        ([(X, Y), (NAN, Y)], None, None, "client 1.*row 1, column ."),
        ([(X, Y)], [(NAN, Y)], None, "test.*client 0.*row 1, column ."),
        (
            [(X, np.array([0.0, np.inf]))],
            None,
            None,
            "targets.*row 1",
        ),
        ([(X.astype(str), Y)], None, None, "type"),
        ([(X, Y - 1)], None, None, "label -1"),
        ([(X, Y + 3)], None, 3, "label 3"),
        ([(X, Y)], [(X, Y + 3)], 3, "label 3"),
    ],
)
def test_from_arrays_refuses(train, test, classes, says):
    with pytest.raises(InputError, match=says):
        Clients.from_arrays(train, test, num_classes=classes)


def test_a_client_without_examples_is_named():
    with pytest.raises(InputError, match=r"client 1 .*training"):
        Clients.from_arrays([(X, Y), (X[:0], Y[:0])])


def test_labels_and_real_targets_do_not_mix():
    with pytest.raises(InputError):
        Clients.from_arrays([(X, Y)], [(X, Y + 0.5)])
    with pytest.raises(InputError):
        Clients.from_arrays([(X, Y), (X, Y + 0.5)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            (np.zeros((3, 2)), np.zeros(3, int)),
            "client 0.*pair",
        ),
        ({"north": (np.zeros((3, 2)), np.zeros(3, int))}, "pair"),
        (
            [(np.zeros((2, 2)), np.array(["a", "b"]))],
            "client 0 .*<U1",
        ),
        ([], "no clients"),
    ],
)
def test_what_is_no_list_of_pairs_is_told(given, says):
    with pytest.raises(InputError, match=says):
        Clients.from_arrays(given)
    pair = np.zeros((2, 3)), np.array([0, 1])
    with pytest.raises(InputError, match=r"id 'north'.*`names`"):
        Clients.from_arrays([pair], ids=["north"])


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([1, 2, 3, 1], "class 0.* 3"),
        ([0, 1, 3, 1], "class 2"),
        ([0.0, 1.0] * 15, "targets.* 2 "),
    ],
)
def test_targets_that_may_be_meant_otherwise_are_warned_of(targets, says):
    y = np.array(targets)
    with pytest.warns(UserWarning, match=says):
        Clients.from_arrays([(np.zeros((len(y), 2)), y)])


@pytest.mark.filterwarnings("error")
def test_other_targets_are_not_warned_of():
    rng = np.random.default_rng(0)
    for y in (
        np.arange(30) % 3,
        np.zeros(5, int),
        rng.normal(size=30),
        np.arange(30.0),
        np.ones(30),
        np.array([0.0, 1.0]),
    ):
        Clients.from_arrays([(np.zeros((len(y), 2)), y)])
    Clients.from_arrays([(np.zeros((3, 2)), np.array([1, 2, 2]))], num_classes=4)


def test_labels_of_one_column_are_labels_and_one_hot_ones_are_refused():
    x, y = np.zeros((4, 2)), np.array([[0], [1], [2], [1]])
    assert Clients.from_arrays([(x, y)]).train.y.tolist() == [0, 1, 2, 1]
    with pytest.raises(
        InputError,
        match=r"client 0 .*\(4, 3\)",
    ):
        Clients.from_arrays([(x, np.eye(4, 3, dtype=int))])


def test_columns_that_lose_their_digits_are_told():
    rng = np.random.default_rng(0)
    fine = rng.normal(size=(50, 3))
    times = fine.copy()
    times[:, 1] = 1.7e9 + rng.normal(0, 60, 50)
    y = rng.integers(0, 2, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Clients.from_arrays([(fine, y)])
        Clients.from_arrays([(1e6 + fine.astype(np.float32), y)])  # as they came
    with pytest.warns(UserWarning, match="column 1 .* 5[0-9]"):
        Clients.from_arrays([(times, y)])
    with pytest.warns(UserWarning, match="column 0 "):
        Clients.from_arrays([(np.array([[16777217], [16777216]]), np.array([0, 1]))])
