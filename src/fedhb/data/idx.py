"""MNIST, Fashion-MNIST and EMNIST from idx files.

An idx file of bytes is: two zero bytes, 0x08 (unsigned byte), the number of axes, then each axis's
length as a big-endian 32-bit integer, then the values, last axis fastest; often gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedhb.data import locate
from fedhb.data.dataset import Dataset, Examples
from fedhb.errors import InputError

MAX_BYTES = 1 << 30
"""The largest file that is read: twice the largest official one (EMNIST by merge, 547 MB)."""

NUM_CLASSES = {"mnist": 10, "fashion-mnist": 10, "emnist": 47}
SIDE = 28
BY_MERGE = 697_932, 116_323
"""The training and test examples of the official EMNIST by merge."""

# MNIST and Fashion-MNIST have the same file names; their first training labels tell them apart.
_FIRST_LABELS = {
    "mnist": bytes((5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7)),
    "fashion-mnist": bytes((9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9, 5, 5, 7, 9)),
}


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Read a data set of the MNIST family.

    Args:
        name: "mnist", "fashion-mnist" or "emnist" (47 classes: where the upper and the lower case
            of a letter look alike, they are one class).
        root: the folder to look in (default: the search path of `fedhb.data.locate`).

    Returns:
        x uint8 [n, 1, 28, 28], y int64 [n].
    """
    paths = locate.find(name, root)
    hashes: dict[str, str] = {}
    train = _examples(name, paths[0], paths[1], hashes)
    test = _examples(name, paths[2], paths[3], hashes)
    for other, first in _FIRST_LABELS.items():
        if other != name and train.y[: len(first)].tolist() == list(first):
            raise InputError(
                f"{paths[1].parent} holds {other}, not {name}: keep each in a folder of its own, "
                f"such as ROOT/{name}"
            )
    title = "EMNIST (re-split)" if name == "emnist" and (len(train), len(test)) != BY_MERGE else ""
    return Dataset(name, train, test, NUM_CLASSES[name], hashes, title)


def _examples(name: str, image_path: Path, label_path: Path, hashes: dict[str, str]) -> Examples:
    """Read the images and labels of one split, and add the hashes of their files to `hashes`."""
    images, hashes[image_path.name] = read(image_path, 3)
    labels, hashes[label_path.name] = read(label_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise InputError(
            f"{image_path}: images of {images.shape[1]} x {images.shape[2]} pixels, but {name} has "
            f"{SIDE} x {SIDE}: replace it by the official file"
        )
    if len(images) != len(labels):
        raise InputError(
            f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels: "
            "take both files from one copy"
        )
    if labels.max() >= NUM_CLASSES[name]:
        raise InputError(
            f"{label_path}: label {labels.max()} (row {labels.argmax()}) is out of range "
            f"0..{NUM_CLASSES[name] - 1} for {name}: replace it by the official file"
        )
    if name == "emnist":
        images = np.ascontiguousarray(images.transpose(0, 2, 1))  # stored column by column
    return Examples(images[:, None], labels.astype(np.int64))


def read(path: Path, num_axes: int) -> tuple[np.ndarray, str]:
    """Read an idx file of bytes, gzipped or not.

    Args:
        path: the file.
        num_axes: how many axes it must have.

    Returns:
        (array uint8 with `num_axes` axes, sha256 of the file as stored).
    """
    try:
        with path.open("rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            # The content decides: some browsers unpack a download and keep its name.
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _parse(cast(IO[bytes], raw), path, num_axes), digest
            with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                return _parse(cast(IO[bytes], unpacked), path, num_axes), digest
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, f"its gzip stream is damaged or cut off ({error})") from error
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error}): check its permissions, or replace the file"
        ) from error


def _parse(stream: IO[bytes], path: Path, num_axes: int) -> np.ndarray:
    header = stream.read(4 + 4 * num_axes)
    expected = bytes((0, 0, 8, num_axes))
    if header[:4] != expected:
        raise _broken(
            path, f"it starts with {header[:4].hex(' ') or 'nothing'}, not with {expected.hex(' ')}"
        )
    if len(header) < 4 + 4 * num_axes:
        raise _broken(path, "it ends within its header")
    shape = struct.unpack(f">{num_axes}I", header[4:])
    size = math.prod(shape)
    if not 0 < size <= MAX_BYTES:  # before anything is allocated
        raise _broken(
            path, f"it declares {' x '.join(map(str, shape))} bytes; 1 to {MAX_BYTES} are possible"
        )
    array = np.empty(shape, dtype=np.uint8)
    view, filled = array.data.cast("B"), 0
    while filled < size:
        count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise _broken(path, f"it is cut off: {filled} of {size} declared bytes")
        filled += count
    if stream.read(1):  # also makes gzip check its checksum
        raise _broken(path, f"bytes follow the {size} declared ones")
    return array


def _broken(path: Path, why: str) -> InputError:
    return InputError(
        f"{path}: not a sound idx file: {why}. Delete it and get it again, for example with "
        "`fedhb data get`"
    )
