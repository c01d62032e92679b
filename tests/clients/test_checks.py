"""What clients are made from: what is refused, and what may not be meant so."""

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
        ([(X, Y)], [], None, "1 clients have training data but 0 have test data"),
        ([(X, Y), (X, Y[:1])], None, None, "client 1 has 2 training inputs but 1 targets"),
        (
            [(X, Y), (np.zeros((2, 3)), Y)],
            None,
            None,
            r"client 1 has inputs of shape \(3,\), others of \(2,\)",
        ),
        (
            [(X, Y)],
            [(np.zeros((2, 3)), Y)],
            None,
            r"test inputs have shape \(3,\), training inputs \(2,\)",
        ),
        ([(X, Y), (NAN, Y)], None, None, "training inputs of client 1: row 1, column . holds NaN"),
        ([(X, Y)], [(NAN, Y)], None, "test inputs of client 0: row 1, column . holds NaN"),
        (
            [(X, np.array([0.0, np.inf]))],
            None,
            None,
            "training targets: row 1 holds NaN or infinity",
        ),
        ([(X.astype(str), Y)], None, None, "give numbers"),
        ([(X, Y - 1)], None, None, "label -1 is out of range"),
        ([(X, Y + 3)], None, 3, r"label 3 is out of range 0..2"),
        ([(X, Y)], [(X, Y + 3)], 3, r"label 3 is out of range 0..2"),
    ],
)
def test_from_arrays_refuses(train, test, classes, says):
    with pytest.raises(InputError, match=says):
        Clients.from_arrays(train, test, num_classes=classes)


def test_a_client_without_examples_is_named():
    with pytest.raises(InputError, match="client 1 has no training examples"):
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
            "client 0's training data are not an .x, y. pair: give a list",
        ),
        ({"north": (np.zeros((3, 2)), np.zeros(3, int))}, "give a list with one pair per client"),
        (
            [(np.zeros((2, 2)), np.array(["a", "b"]))],
            "client 0 has targets of type <U1: give integer class labels",
        ),
        ([], "no clients"),
    ],
)
def test_what_is_no_list_of_pairs_is_told(given, says):
    with pytest.raises(InputError, match=says):
        Clients.from_arrays(given)
    pair = np.zeros((2, 3)), np.array([0, 1])
    with pytest.raises(InputError, match=r"id 'north': give whole numbers .* names go to `names`"):
        Clients.from_arrays([pair], ids=["north"])


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([1, 2, 3, 1], "no training example has class 0, though labels go up to 3"),
        ([0, 1, 3, 1], "no training example has class 2"),
        ([0.0, 1.0] * 15, "the real targets have only 2 different values, all whole numbers"),
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
        match=r"client 0 has training labels of shape \(4, 3\): give the number of the class",
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
    with pytest.warns(UserWarning, match=r"column 1 of the inputs .* deviates by 5[0-9]"):
        Clients.from_arrays([(times, y)])
    with pytest.warns(UserWarning, match="column 0 of the inputs"):
        Clients.from_arrays([(np.array([[16777217], [16777216]]), np.array([0, 1]))])
