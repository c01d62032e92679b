"""The idx reader accepts sound files only, and hands the images out upright."""

import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from fedhb import data
from fedhb.data import idx
from fedhb.errors import InputError


def encode(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_split(
    folder: Path, images: str, labels: str, x: np.ndarray, y: np.ndarray, packed: bool = True
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((images, x), (labels, y)):
        content = encode(array.astype(np.uint8))
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def write_dataset(
    folder: Path, classes: int = 10, prefix: str = "", test: str = "t10k", packed: bool = True
):
    rng = np.random.default_rng(3)
    splits = []
    for split, n in (("train", 30), (test, 12)):
        x = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        y = np.arange(n) % classes
        write_split(
            folder,
            f"{prefix}{split}-images-idx3-ubyte",
            f"{prefix}{split}-labels-idx1-ubyte",
            x,
            y,
            packed,
        )
        splits.append((x, y))
    return splits


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_reads_images_and_labels(tmp_path, name, packed):
    (x, y), (x_test, y_test) = write_dataset(tmp_path / name, packed=packed)
    dataset = data.load(name, tmp_path)
    assert (dataset.name, dataset.num_classes) == (name, 10)
    assert dataset.train.x.dtype == np.uint8 and dataset.train.y.dtype == np.int64
    np.testing.assert_array_equal(dataset.train.x, x[:, None])
    np.testing.assert_array_equal(dataset.train.y, y)
    np.testing.assert_array_equal(dataset.test.x, x_test[:, None])
    np.testing.assert_array_equal(dataset.test.y, y_test)
    assert dataset.train.x.flags.writeable  # torch warns of arrays that are not


def test_records_the_hash_of_every_file_as_stored(tmp_path):
    write_dataset(tmp_path / "mnist")
    recorded = data.load("mnist", tmp_path).files
    stored = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "mnist").iterdir()
    }
    assert recorded == stored and len(recorded) == 4


def test_emnist_is_transposed_and_has_47_classes(tmp_path):
    (x, y), _ = write_dataset(
        tmp_path / "emnist", classes=47, prefix="emnist-bymerge-", test="test"
    )
    dataset = data.load("emnist", tmp_path)
    assert dataset.title == "EMNIST (re-split)"  # its numbers of examples are not the official ones
    assert dataset.num_classes == 47
    np.testing.assert_array_equal(dataset.train.x[:, 0], x.transpose(0, 2, 1))
    np.testing.assert_array_equal(dataset.train.y, y)
    assert dataset.train.x.flags.c_contiguous


def test_an_unpacked_file_that_kept_its_gz_name_is_read(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(encode(np.arange(5, dtype=np.uint8)))
    np.testing.assert_array_equal(idx.read(path, 1)[0], np.arange(5))


GOOD = encode(np.arange(60, dtype=np.uint8).reshape(5, 3, 4))
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "nothing"),
        (b"\x00\x00\x09\x03" + GOOD[4:], "00 00 09 03"),
        (encode(np.arange(60, dtype=np.uint8)), "00 00 08 01"),
        (GOOD[:10], "header"),
        (GOOD[:-1], "59 of 60"),
        (GOOD + b"\x00", " 60 "),
        (bytes((0, 0, 8, 3)) + struct.pack(">3I", 0, 28, 28), "0 x 28 x 28"),
        (
            bytes((0, 0, 8, 3)) + struct.pack(">3I", 4_000_000_000, 4_000_000_000, 28),
            "4000000000",
        ),
        (PACKED[:-12], "gzip"),
        (PACKED[:-8] + b"\x00\x00\x00\x00" + PACKED[-4:], "CRC"),
        (PACKED[:12] + b"\xff\xff\xff" + PACKED[15:], "gzip"),
        (gzip.compress(GOOD[:-1], mtime=0), "59 of 60"),
        (gzip.compress(GOOD + b"\x00", mtime=0), " 60 "),
        (b"<!DOCTYPE html>", "3c 21 44 4f"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_refuses_unsound_files(tmp_path, content, says):
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        idx.read(path, 3)
    assert str(path) in str(caught.value) and "fedhb data get" in str(caught.value)


def test_a_sound_file_passes_where_unsound_ones_fail(tmp_path):
    path = tmp_path / "images"
    for content in (GOOD, PACKED):
        path.write_bytes(content)
        np.testing.assert_array_equal(idx.read(path, 3)[0].ravel(), np.arange(60))


def test_nothing_is_allocated_for_a_size_that_cannot_be(tmp_path, monkeypatch):
    path = tmp_path / "images"
    path.write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**31, 28, 28))
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(InputError, match="2147483648"):
        idx.read(path, 3)


def test_refuses_files_that_do_not_belong_together(tmp_path):
    folder = tmp_path / "mnist"
    write_dataset(folder)
    names = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    write_split(folder, *names, np.zeros((12, 28, 28)), np.zeros(11))
    with pytest.raises(InputError, match=r"12 images.* 11 labels"):
        data.load("mnist", tmp_path)
    write_split(folder, *names, np.zeros((12, 32, 32)), np.zeros(12))
    with pytest.raises(InputError, match="32 x 32"):
        data.load("mnist", tmp_path)
    write_split(folder, *names, np.zeros((12, 28, 28)), np.array([0] * 7 + [10] + [0] * 4))
    with pytest.raises(InputError, match=r"label 10 .*row 7"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("holds", "asked"), [("mnist", "fashion-mnist"), ("fashion-mnist", "mnist")]
)
def test_the_other_data_set_with_the_same_file_names_is_not_taken(tmp_path, holds, asked):
    write_dataset(tmp_path)
    labels = np.frombuffer(idx._FIRST_LABELS[holds], dtype=np.uint8)
    write_split(
        tmp_path,
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        np.zeros((len(labels), 28, 28)),
        labels,
    )
    assert len(data.load(holds, tmp_path).train) == 16
    with pytest.raises(InputError, match=f"{holds}.*{asked}"):
        data.load(asked, tmp_path)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind this user"
)
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    write_dataset(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.chmod(0)
    with pytest.raises(InputError, match=r"idx|ubyte"):
        data.load("mnist", tmp_path)


REAL = {"mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000), "emnist": (185_306, 30_862)}


@pytest.mark.slow
@pytest.mark.skipif("FEDHB_DATA" not in os.environ, reason="FEDHB_DATA names no real data")
@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    if not next(record for record in data.status() if record.name == name).present:
        pytest.skip(f"{name} is not there")
    dataset = data.load(name)
    assert len(dataset.train) >= REAL[name][0] and len(dataset.test) >= REAL[name][1]
    counts = np.bincount(dataset.train.y, minlength=dataset.num_classes)
    assert len(counts) == dataset.num_classes and counts.min() > 0


@pytest.mark.slow
@pytest.mark.skipif("FEDHB_DATA" not in os.environ, reason="FEDHB_DATA names no real data")
def test_real_emnist_digits_stand_as_those_of_mnist():
    present = {record.name for record in data.status() if record.present}
    if not {"mnist", "emnist"} <= present:
        pytest.skip("needs mnist and emnist")
    mnist, emnist = data.load("mnist").train, data.load("emnist").train
    for digit in (1, 4, 7):
        ours, theirs = (part.x[part.y == digit, 0].mean(axis=0).ravel() for part in (emnist, mnist))
        turned = ours.reshape(28, 28).T.ravel()
        assert np.corrcoef(ours, theirs)[0, 1] > np.corrcoef(turned, theirs)[0, 1] + 0.1
