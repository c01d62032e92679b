"""The embedded digits: whole, split by class, the same always."""

import numpy as np
from sklearn.datasets import load_digits

from fedhb import data
from fedhb.data import digits


def test_shapes_and_values():
    dataset = data.load("digits")
    assert (dataset.name, dataset.num_classes) == ("digits", 10)
    assert dataset.train.x.dtype == np.uint8 and dataset.train.y.dtype == np.int64
    assert dataset.train.x.shape[1:] == (1, 8, 8) and dataset.train.x.max() == 16
    assert len(next(iter(dataset.files.values()))) == 64


def test_every_digit_is_in_exactly_one_split():
    dataset, source = data.load("digits"), load_digits()

    def rows(x, y):
        return sorted(
            (*image, int(label))
            for image, label in zip(x.reshape(len(x), -1).tolist(), y, strict=True)
        )

    ours = rows(dataset.train.x, dataset.train.y) + rows(dataset.test.x, dataset.test.y)
    assert sorted(ours) == rows(source.images.astype(int), source.target)


def test_a_fifth_of_each_class_is_held_out():
    dataset = data.load("digits")
    train, test = (np.bincount(part.y, minlength=10) for part in (dataset.train, dataset.test))
    np.testing.assert_array_equal(test, np.floor(0.2 * (train + test) + 0.5))


def test_the_split_never_changes():
    dataset = data.load("digits")
    # Results of the project depend on this split: a change of it must be meant.
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert dataset.test.y[:12].tolist() == [8, 0, 2, 3, 1, 4, 5, 5, 6, 9, 7, 1]
    assert int(dataset.test.x.astype(np.int64).sum()) == 113_065
    np.testing.assert_array_equal(dataset.test.x, data.load("digits").test.x)


def test_they_are_found_without_their_file_too(monkeypatch):
    direct = digits._read()
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    np.testing.assert_array_equal(digits._read(), direct)
