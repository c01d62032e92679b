"""CIFAR-100 from its official binary files.

A record is one byte of coarse label (20 classes), one of fine label (100 classes), and 3072 bytes
of pixels: the red, green and blue planes of 32 x 32, row by row.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from fedhb.data import locate
from fedhb.data.dataset import Dataset, Examples
from fedhb.errors import InputError

RECORD = 2 + 3 * 32 * 32
MAX_BYTES = 1 << 30
"""The largest file that is read: seven times the official training file."""

NUM_COARSE, NUM_FINE = 20, 100


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Read CIFAR-100.

    Args:
        name: "cifar-100" (100 fine classes) or "cifar-100-coarse" (20 superclasses).
        root: the folder to look in (default: the search path of `fedhb.data.locate`).

    Returns:
        x uint8 [n, 3, 32, 32], y int64 [n].
    """
    coarse = name == "cifar-100-coarse"
    train_path, test_path = locate.find(name, root)
    train, train_hash = read(train_path, coarse)
    test, test_hash = read(test_path, coarse)
    hashes = {train_path.name: train_hash, test_path.name: test_hash}
    return Dataset(name, train, test, NUM_COARSE if coarse else NUM_FINE, hashes)


def read(path: Path, coarse: bool) -> tuple[Examples, str]:
    """Read one file.

    Args:
        path: the file.
        coarse: whether y is the coarse label, not the fine one.

    Returns:
        (x uint8 [n, 3, 32, 32] and y int64 [n], sha256 of the file).
    """
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_BYTES or size % RECORD:
            raise InputError(
                f"{path}: {size} bytes are not a whole number of CIFAR-100 records ({RECORD} bytes "
                f"each, at most {MAX_BYTES} in all). Delete it and get it again, for example with "
                "`fedhb data get cifar-100`"
            )
        records = np.fromfile(path, dtype=np.uint8, count=size).reshape(-1, RECORD)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error}): check its permissions, or replace the file"
        ) from error
    for column, classes, kind in ((0, NUM_COARSE, "coarse"), (1, NUM_FINE, "fine")):
        labels = records[:, column]
        if labels.max() >= classes:
            raise InputError(
                f"{path}: {kind} label {labels.max()} (record {labels.argmax()}) is out of range "
                f"0..{classes - 1}: use the binary version of CIFAR-100 (not CIFAR-10, not the "
                "Python version)"
            )
    x = np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, 32, 32)
    y = records[:, 0 if coarse else 1].astype(np.int64)
    return Examples(x, y), hashlib.sha256(records.data).hexdigest()
