"""The CIFAR-100 reader: record layout, both label sets, every place where the files may lie."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from fedhb import data
from fedhb.errors import InputError


def records(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, (n, 3074), dtype=np.uint8)
    out[:, 0], out[:, 1] = rng.integers(0, 20, n), rng.integers(0, 100, n)
    return out


def write(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    train, test = records(7, 1), records(3, 2)
    train.tofile(folder / "train.bin")
    test.tofile(folder / "test.bin")
    return train, test


@pytest.mark.parametrize(
    ("name", "column", "classes"), [("cifar-100", 1, 100), ("cifar-100-coarse", 0, 20)]
)
@pytest.mark.parametrize(
    "place", ["cifar-100-binary", "cifar-100/cifar-100-binary", "cifar-100", "."]
)
def test_reads_both_label_sets_from_every_place(tmp_path, name, column, classes, place):
    train, test = write(tmp_path / place)
    dataset = data.load(name, tmp_path)
    assert (dataset.name, dataset.num_classes) == (name, classes)
    np.testing.assert_array_equal(dataset.train.y, train[:, column])
    np.testing.assert_array_equal(dataset.test.y, test[:, column])
    assert dataset.train.x.dtype == np.uint8 and dataset.train.y.dtype == np.int64
    assert dataset.test.x.shape == (3, 3, 32, 32)
    # green plane, second row, fifth pixel of the third record
    assert dataset.train.x[2, 1, 1, 4] == train[2, 2 + 1024 + 32 + 4]
    assert dataset.train.x.flags.writeable and dataset.train.x.flags.c_contiguous


def test_the_coarse_labels_may_have_a_folder_of_their_own(tmp_path):
    write(tmp_path / "cifar-100-coarse")
    assert data.load("cifar-100-coarse", tmp_path).num_classes == 20


def test_records_hashes(tmp_path):
    write(tmp_path / "cifar-100-binary")
    stored = {
        name: hashlib.sha256((tmp_path / "cifar-100-binary" / name).read_bytes()).hexdigest()
        for name in ("train.bin", "test.bin")
    }
    assert data.load("cifar-100", tmp_path).files == stored


@pytest.mark.parametrize("size", [0, 1, 3073, 3075, 2 * 3074 - 1])
def test_refuses_a_file_that_is_not_whole_records(tmp_path, size):
    write(tmp_path)
    (tmp_path / "test.bin").write_bytes(bytes(size))
    with pytest.raises(InputError, match=rf"test\.bin: {size} bytes"):
        data.load("cifar-100", tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "what"), [(0, 20, "coarse label 20"), (1, 100, "fine label 100")]
)
def test_refuses_labels_out_of_range(tmp_path, column, value, what):
    train, _ = write(tmp_path)
    train[4, column] = value
    train.tofile(tmp_path / "train.bin")
    with pytest.raises(InputError, match=rf"{what}.*record 4"):
        data.load("cifar-100", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("FEDHB_DATA" not in os.environ, reason="FEDHB_DATA names no real data")
def test_real_files():
    if not next(record for record in data.status() if record.name == "cifar-100").present:
        pytest.skip("cifar-100 is not there")
    fine, coarse = data.load("cifar-100"), data.load("cifar-100-coarse")
    assert fine.train.x.shape == (50_000, 3, 32, 32) and fine.test.x.shape == (10_000, 3, 32, 32)
    assert (np.bincount(fine.train.y) == 500).all() and (np.bincount(coarse.train.y) == 2500).all()
    for label in range(100):  # a fine class lies in one superclass
        assert len(np.unique(coarse.train.y[fine.train.y == label])) == 1
