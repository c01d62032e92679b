"""Data files from elsewhere: whatever is in them, a reader gives a result or an InputError, and
needs no more memory than it says.
"""

from __future__ import annotations

import gzip
import io
import random
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import LIMIT, ROOM, changed, many, only_input_errors, peak

from fedhb.data import cifar, idx, table
from fedhb.errors import InputError
from fedhb.runs import checkpoint


@pytest.fixture(autouse=True)
def bounded(monkeypatch) -> Iterator[None]:
    """Peak memory over the whole test, from the kernel's own count."""
    for module, name in (
        (idx, "MAX_BYTES"),
        (cifar, "MAX_BYTES"),
        (table, "MAX_BYTES"),
        (checkpoint, "MOST_BYTES"),
    ):
        monkeypatch.setattr(module, name, LIMIT)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    yield
    grown = peak() - before
    assert grown < 8 * LIMIT + ROOM, f"{grown / 2**20:.0f} MiB"


def idx_file(shape: tuple[int, ...]) -> bytes:
    head = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    return (
        head + bytes(range(256)) * (int(np.prod(shape)) // 256) + bytes(int(np.prod(shape)) % 256)
    )


IDX = {1: idx_file((40,)), 3: idx_file((3, 28, 28))}


@many
def test_idx(path, rng):
    axes = rng.choice((1, 3))
    content = changed(IDX[rng.choice((1, 3, axes, axes))], rng)
    if rng.random() < 0.4:
        content = gzip.compress(content, 1)
        content = changed(content, rng) if rng.random() < 0.5 else content
    path.write_bytes(content)
    found = only_input_errors(lambda: idx.read(path, axes))
    if found is not None:
        assert found[0].ndim == axes and found[0].dtype == np.uint8 and 0 < found[0].nbytes <= LIMIT


def zeros(file: Any, count: int) -> None:
    for _ in range(count // 2**20):
        file.write(bytes(2**20))


def test_a_bomb_of_zeros_is_bounded(tmp_path):
    """A gzip or zip file of some kilobytes can unpack to gigabytes: what is declared bounds what is
    read.
    """
    path = tmp_path / "bomb"
    with gzip.open(path, "wb") as file:
        file.write(bytes((0, 0, 8, 3)) + struct.pack(">3I", 100, 28, 28))
        zeros(file, 2**28)
    with pytest.raises(InputError, match="78400"):
        idx.read(path, 3)
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**20, 28, 28)))
    with pytest.raises(InputError, match="1048576 x 28 x 28"):
        idx.read(path, 3)
    for declared, held in ((2**28, 2**28), (2**40, 2**20), (2**20, 2**28)):
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            member, {"descr": "|u1", "fortran_order": False, "shape": (declared // 4, 4)}
        )
        with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("x.npy", "y.npy"):
                with archive.open(name, "w") as file:
                    file.write(member.getvalue())
                    zeros(file, held)
        with pytest.raises(InputError, match=r"bytes"):
            table.read_npz(path.with_suffix(".npz"))


@many
def test_cifar(path, rng):
    content = changed(bytes(2 * cifar.RECORD), rng)
    path.write_bytes(
        content[: len(content) // cifar.RECORD * cifar.RECORD] if rng.random() < 0.7 else content
    )
    found = only_input_errors(lambda: cifar.read(path, rng.random() < 0.5))
    if found is not None:
        examples, _ = found
        assert (
            examples.x.shape == (len(examples.y), 3, 32, 32)
            and 0 <= examples.y.min() <= examples.y.max() < 100
        )


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


KINDS = [
    "<f4",
    "<f8",
    "|u1",
    "|O",
    "<U3",
    "<U100000000",
    "|S5",
    "<c8",
    "<M8[s]",
    "|V8",
    "<f2",
    ">i8",
    "|b1",
    [("a", "<f4")],
]


def npy_file(sound: np.ndarray, rng: random.Random) -> bytes:
    """An array as it is, changed at random, or with a header of its own."""
    how = rng.randrange(5)
    if how < 2:
        return npy(sound)
    if how == 2:
        return changed(npy(sound), rng)
    shape = tuple(
        rng.choice((0, 1, 2, 3, 20, -1, 2**31, 2**62, 2**64)) for _ in range(rng.randrange(5))
    )
    header = repr(
        {"descr": rng.choice(KINDS), "fortran_order": rng.random() < 0.5, "shape": shape}
    ).encode()
    header = changed(header, rng) if how == 4 else header
    version = rng.choice((1, 2, 3))
    length = struct.pack("<H" if version == 1 else "<I", len(header) % 2**16)
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + bytes(rng.choice((0, 8, 80, 160)))


ROWS = 20


SOUND = {
    "x": np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4),
    "y": np.arange(ROWS) % 3,
    "client": np.array([f"c{k % 4}" for k in range(ROWS)]),
    "split": (np.arange(ROWS) % 5 == 0).astype(np.int8),
}


@many
def test_npz(path, rng):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of a name given twice
        with zipfile.ZipFile(
            file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        ) as archive:
            for name in [
                "x",
                "y",
                *rng.sample(["client", "split", "x", "z", "../y"], rng.choice((0, 0, 1, 1, 2))),
            ]:
                suffix = rng.choice((".npy", ".npy", ".npy", ""))
                archive.writestr(f"{name}{suffix}", npy_file(SOUND.get(name, SOUND["x"]), rng))
    path.write_bytes(changed(file.getvalue(), rng) if rng.random() < 0.5 else file.getvalue())
    found = only_input_errors(lambda: table.read_npz(path))
    if found is not None:
        assert (
            len(found.train)
            and found.train.x.dtype in (np.float32, np.uint8)
            and np.isfinite(found.train.x).all()
        )


@many
def test_npy(path, rng):
    path.write_bytes(npy_file(SOUND["x"], rng))
    found = only_input_errors(lambda: table.read_npy(path))
    assert found is None or found.nbytes <= LIMIT
