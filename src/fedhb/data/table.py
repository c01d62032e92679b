"""The user's own data: one .npz file with `x`, `y` and optionally `client` and `split`."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from fedhb.data.array_checks import check_digits
from fedhb.data.dataset import Dataset, Examples
from fedhb.errors import InputError

KEYS = ("x", "y", "client", "split")
TEST_SHARE = 0.2
MAX_CLASSES = 100_000
_SPLIT_SEED = 20

MAX_BYTES = 1 << 34
"""The largest size of a file's arrays, unpacked: 16 GiB. A small file can declare any size."""


def is_table(name: str) -> bool:
    """Return whether a text names a file that `read_table` reads, by its suffix."""
    return Path(name).suffix in READERS


def read_table(path: str | os.PathLike[str], test_share: float = TEST_SHARE) -> Dataset:
    """Read the user's own file, in the format that its suffix says; see `read_npz`."""
    return READERS.get(Path(path).suffix, read_npz)(path, test_share)


def read_npz(path: str | os.PathLike[str], test_share: float = TEST_SHARE) -> Dataset:
    """Read a data set from a .npz file.

    The file holds `x` [n, ...]; `y`, integer class labels [n] (0, 1, ...) or real targets [n] or
    [n, q]; optionally `client` [n], integers or strings that say who holds each row; and optionally
    `split` [n], 0 for training rows and 1 for test rows.

    Without `split` a share of the rows become test rows, always the same ones: a share of each
    client's rows if the file names clients, else of each class, and at least one row of each client
    or class that has two.

    Args:
        path: the file.
        test_share: the share of the rows that become test rows if the file has no `split`; 0 for
            none.

    Returns:
        The data set: x as stored if it is uint8, else float32; y int64 or float32; its name is the
        file's name without the suffix.
    """
    path = Path(path)
    arrays, digest = _arrays(path)
    x = _inputs(path, arrays["x"])
    y = _targets(path, arrays["y"], len(x))
    client = _clients(path, arrays["client"], len(x)) if "client" in arrays else None
    if "split" in arrays:
        test = _split(path, arrays["split"], len(x))
    elif test_share == 0:
        test = np.zeros(len(x), dtype=bool)
    elif client is not None:
        test = held_out(client, test_share, _SPLIT_SEED)
    else:
        classes = y if y.dtype.kind == "i" else np.zeros(len(y), dtype=np.int64)
        test = held_out(classes, test_share, _SPLIT_SEED)
    train_part, test_part = (
        Examples(x[rows], y[rows], None if client is None else client[rows])
        for rows in (~test, test)
    )
    num_classes = int(y.max()) + 1 if y.dtype.kind == "i" else None
    drawn = 0.0 if "split" in arrays else test_share
    return Dataset(path.stem, train_part, test_part, num_classes, {path.name: digest}, drawn=drawn)


def held_out(group: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Choose a share of every group at random.

    At least one row of a group that has two is chosen, and never the whole group.

    Args:
        group: the group of each row [n], integers or strings.
        share: the share of each group, between 0 and 1.
        seed: equal seeds choose equal rows.

    Returns:
        Whether each row is chosen, bool [n].
    """
    _, member, sizes = np.unique(group, return_inverse=True, return_counts=True)
    counts = np.clip(np.floor(share * sizes + 0.5).astype(np.int64), 1, np.maximum(sizes - 1, 0))
    order = np.lexsort((np.random.default_rng(seed).random(len(group)), member))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(group), dtype=bool)
    chosen[order] = rank < np.repeat(counts, sizes)
    return chosen


def _arrays(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Read the file's arrays by key, and its sha256.

    Nothing in the file is ever unpickled, and sizes are checked before memory is allocated.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file: give the path of a .npz file with x and y")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            if not zipfile.is_zipfile(file):
                raise InputError(
                    f"{path}: not a .npz file: write it with numpy.savez(path, x=x, y=y)"
                )
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                unknown = sorted(set(names) - set(KEYS))
                if unknown:
                    raise InputError(
                        f"{path}: unknown key {unknown[0]!r}: a data file may hold "
                        f"{', '.join(KEYS)}"
                    )
                missing = [key for key in ("x", "y") if key not in names]
                if missing:
                    raise InputError(
                        f"{path}: key {missing[0]!r} is missing: write it with "
                        "numpy.savez(path, x=x, y=y)"
                    )
                total = sum(entry.file_size for entry in archive.infolist())
                if len(set(names)) < len(names) or total > MAX_BYTES:
                    raise InputError(
                        f"{path}: {len(names)} arrays of {total} bytes: give each array once, and "
                        f"at most {MAX_BYTES} bytes in all"
                    )
                return {
                    key: _member(path, archive, key, name)
                    for key, name in zip(names, archive.namelist(), strict=True)
                }, digest
    except InputError:
        raise
    # zipfile raises exceptions of many kinds for damaged, encrypted and unusual files.
    except Exception as error:
        raise InputError(
            f"{path}: cannot be read as a .npz file ({error}): write it again with numpy.savez"
        ) from error


def _member(path: Path, archive: zipfile.ZipFile, key: str, name: str) -> np.ndarray:
    try:
        with archive.open(name) as stream:
            return read_array(stream, archive.getinfo(name).file_size)
    except Exception as error:  # numpy too raises exceptions of many kinds
        raise InputError(
            f"{path}: {key!r} cannot be read ({error}): store plain numbers (for client also "
            "strings), not objects"
        ) from error


def read_npy(path: Path) -> np.ndarray:
    """Read an array from a .npy file of unknown origin."""
    try:
        with path.open("rb") as file:
            return read_array(file, path.stat().st_size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # see _member
        raise InputError(
            f"{path} is not a .npy file of numbers ({error}): write one array with numpy.save"
        ) from None


def read_array(stream: IO[bytes], size: int) -> np.ndarray:
    """Read an array in numpy's format from a stream of `size` bytes, and check its header first.

    The header must declare exactly as many bytes as follow it, and at most `MAX_BYTES`.
    """
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:  # 3.0 is for arrays with named columns, which hold no plain numbers
        raise ValueError(f"it has version {version} of numpy's format")
    shape, _, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds objects")
    declared, following = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if declared != following or declared > MAX_BYTES or min(shape, default=1) < 0:
        raise ValueError(
            f"it declares {declared} bytes of shape {shape}, but has {following}; at most "
            f"{MAX_BYTES} are read"
        )
    stream.seek(0)
    array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _inputs(path: Path, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iubf":
        raise InputError(f"{path}: x has type {x.dtype}: give numbers")
    if x.ndim < 2:
        raise InputError(
            f"{path}: x has shape {x.shape}: give one row per example, such as x.reshape(-1, 1)"
        )
    if x.size == 0:
        raise InputError(
            f"{path}: x has shape {x.shape}, no values at all: give at least one example"
        )
    return x if x.dtype == np.uint8 else _single(path, "x", x)


def _targets(path: Path, y: np.ndarray, length: int) -> np.ndarray:
    if y.dtype.kind not in "iubf":
        raise InputError(
            f"{path}: y has type {y.dtype}: give integer class labels 0, 1, ... or real targets"
        )
    _check_length(path, "y", y, length)
    if y.dtype.kind == "f":
        if y.ndim > 2 or y.size == 0:
            raise InputError(f"{path}: y has shape {y.shape}: give real targets as [n] or [n, q]")
        return _single(path, "y", y)
    if y.ndim != 1:
        raise InputError(
            f"{path}: integer y has shape {y.shape}: give one label per row, [n]; store real "
            "targets as floating point"
        )
    for value, row in ((y.min(), y.argmin()), (y.max(), y.argmax())):
        if not 0 <= int(value) < MAX_CLASSES:
            raise InputError(
                f"{path}: label {value} (row {row}) is out of range 0..{MAX_CLASSES - 1}: number "
                "the classes from 0 without gaps, or store real targets as floating point"
            )
    return y.astype(np.int64)


def _clients(path: Path, client: np.ndarray, length: int) -> np.ndarray:
    _check_length(path, "client", client, length)
    if client.ndim != 1 or client.dtype.kind not in "iuUS":
        raise InputError(
            f"{path}: client has type {client.dtype} and shape {client.shape}: give integers or "
            "strings, [n]"
        )
    if client.dtype.kind == "S":
        try:
            return np.char.decode(client, "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}: client holds bytes that are not UTF-8 ({error}): give integers or strings"
            ) from error
    return client


def _split(path: Path, split: np.ndarray, length: int) -> np.ndarray:
    """Return whether each row is a test row, bool [n]."""
    _check_length(path, "split", split, length)
    if split.ndim != 1 or split.dtype.kind not in "iub":
        raise InputError(
            f"{path}: split has type {split.dtype} and shape {split.shape}: give integers 0 and 1, "
            "[n]"
        )
    wrong = (split != 0) & (split != 1)
    if wrong.any():
        raise InputError(
            f"{path}: split is {split[wrong.argmax()]} in row {wrong.argmax()}: use 0 for training "
            "rows and 1 for test rows"
        )
    if (split == 1).all():
        raise InputError(f"{path}: split is 1 in every row: mark the training rows with 0")
    return split == 1


def _check_length(path: Path, key: str, array: np.ndarray, length: int) -> None:
    rows = array.shape[0] if array.ndim else 0
    if rows != length:
        raise InputError(f"{path}: {key} has {rows} rows but x has {length}: give one per example")


def _single(path: Path, key: str, array: np.ndarray) -> np.ndarray:
    """Convert the array to float32, and check that every value is finite there."""
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    bad = ~np.isfinite(single).reshape(len(single), -1).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        value = array[row].ravel()[(~np.isfinite(single[row])).ravel().argmax()]
        raise InputError(
            f"{path}: {key} holds {value} in row {row} ({bad.sum()} such rows): remove or replace "
            "values that are not finite or too large for single precision"
        )
    if key == "x":
        check_digits(array, f"inputs of {path.name}")
    return single


READERS = {".npz": read_npz}
"""The reader of each format of a user's own file, by its suffix. A new format is added here."""
