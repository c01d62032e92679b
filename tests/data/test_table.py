"""The user's own .npz: what is read, what is refused, and how rows are split."""

from __future__ import annotations

import hashlib
import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhb.data import read_npz
from fedhb.data.table import held_out
from fedhb.errors import InputError


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def table(n=20):
    return {"x": np.arange(2 * n, dtype=np.float64).reshape(n, 2), "y": np.arange(n) % 4}


def test_labels(tmp_path):
    path = save(tmp_path / "mine.npz", **table(), split=np.arange(20) % 2)
    dataset = read_npz(path)
    assert (dataset.name, dataset.num_classes) == ("mine", 4)
    assert dataset.files == {"mine.npz": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert dataset.train.x.dtype == np.float32 and dataset.train.y.dtype == np.int64
    np.testing.assert_array_equal(dataset.train.x, table()["x"][::2])
    np.testing.assert_array_equal(dataset.test.y, table()["y"][1::2])
    assert dataset.train.client is None


@pytest.mark.parametrize("shape", [(20,), (20, 3)])
def test_real_targets_are_regression(tmp_path, shape):
    y = np.linspace(0, 1, int(np.prod(shape))).reshape(shape)
    dataset = read_npz(save(tmp_path / "r.npz", x=table()["x"], y=y))
    assert dataset.num_classes is None and dataset.train.y.dtype == np.float32
    assert (
        len(dataset.train) == 16
        and len(dataset.test) == 4
        and dataset.train.y.shape[1:] == shape[1:]
    )


@pytest.mark.parametrize(
    ("stored", "read"),
    [("uint8", "uint8"), ("int64", "float32"), ("float16", "float32"), ("bool", "float32")],
)
def test_types_of_inputs(tmp_path, stored, read):
    dataset = read_npz(
        save(tmp_path / "t.npz", x=np.ones((5, 1, 2, 2), stored), y=np.zeros(5, int))
    )
    assert dataset.train.x.dtype == read and dataset.train.x.shape[1:] == (1, 2, 2)


def test_compressed_and_given_as_text(tmp_path):
    np.savez_compressed(tmp_path / "c.npz", **table())
    assert len(read_npz(str(tmp_path / "c.npz")).train) == 16


@pytest.mark.parametrize(
    "client",
    [np.repeat([7, -1], 10), np.repeat(["zoë", "al"], 10), np.repeat([b"zo\xc3\xab", b"al"], 10)],
)
def test_clients_are_integers_or_strings_and_each_has_test_rows(tmp_path, client):
    dataset = read_npz(save(tmp_path / "c.npz", **table(), client=client))
    names = {"zoë", "al"} if client.dtype.kind in "US" else {7, -1}
    assert dataset.test.client is not None and dataset.train.client is not None
    assert set(dataset.test.client.tolist()) == set(dataset.train.client.tolist()) == names
    assert np.unique(dataset.test.client, return_counts=True)[1].tolist() == [2, 2]


def test_rows_stay_together(tmp_path):
    n = 50
    x = np.arange(n, dtype=np.float32)[:, None]
    dataset = read_npz(save(tmp_path / "r.npz", x=x, y=np.arange(n) % 5, client=np.arange(n) % 7))
    for part in (dataset.train, dataset.test):
        np.testing.assert_array_equal(part.x[:, 0] % 5, part.y)
        np.testing.assert_array_equal(part.x[:, 0] % 7, part.client)
    assert sorted([*dataset.train.x[:, 0], *dataset.test.x[:, 0]]) == list(range(n))


def test_without_clients_the_classes_are_split(tmp_path):
    y = np.repeat([0, 1, 2], [50, 10, 2])
    dataset = read_npz(save(tmp_path / "s.npz", x=np.zeros((62, 1)), y=y))
    assert np.bincount(dataset.test.y).tolist() == [10, 2, 1]


def test_a_split_without_test_rows_is_kept(tmp_path):
    dataset = read_npz(save(tmp_path / "s.npz", **table(), split=np.zeros(20, int)))
    assert len(dataset.train) == 20 and len(dataset.test) == 0


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=80), st.floats(0.05, 0.9), st.integers(0, 9)
)
def test_held_out_shares(group, share, seed):
    group = np.array(group)
    chosen = held_out(group, share, seed)
    np.testing.assert_array_equal(chosen, held_out(group, share, seed))
    for value in np.unique(group):
        size, count = int((group == value).sum()), int(chosen[group == value].sum())
        assert count == (
            0 if size == 1 else min(max(1, int(np.floor(share * size + 0.5))), size - 1)
        )


def test_held_out_is_random_within_a_group():
    group = np.zeros(1000, int)
    first, second = held_out(group, 0.2, 0), held_out(group, 0.2, 1)
    assert (first != second).any() and 300 < np.flatnonzero(first).mean() < 700


X, Y = table()["x"], table()["y"]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": X}, "'y'"),
        ({"y": Y}, "'x'"),
        ({"x": X, "y": Y, "labels": Y}, "'labels'"),
        ({"x": X, "y": Y[:-1]}, "y .*19 .*20"),
        ({"x": X, "y": np.int64(3)}, "y .*0 rows"),
        ({"x": X, "y": Y, "client": Y[:3]}, "client .*3 rows"),
        ({"x": X, "y": Y, "split": Y[:3] * 0}, "split .*3 rows"),
        ({"x": X[:, 0], "y": Y}, r"x .*\(20,\)"),
        ({"x": X[:0], "y": Y[:0]}, "x .*values"),
        ({"x": X.astype(str), "y": Y}, "x .*<U"),
        ({"x": X.astype(complex), "y": Y}, "x .*complex"),
        ({"x": np.array([[1, "a"]] * 20, dtype=object), "y": Y}, "'x'"),
        ({"x": X, "y": Y.astype(object)}, "'y'"),
        ({"x": X, "y": Y.astype(str)}, "y .*<U"),
        ({"x": X, "y": Y[:, None]}, r"y .*\(20, 1\)"),
        ({"x": X, "y": np.zeros((20, 2, 2))}, r"y .*\(20, 2, 2\)"),
        ({"x": X, "y": Y - 1}, "label -1 .*row 0"),
        ({"x": X, "y": np.where(Y == 3, 10**12, Y)}, "label 1000000000000 .*row 3"),
        ({"x": np.where(X == 9, np.nan, X), "y": Y}, "x .*nan.*row 4"),
        ({"x": np.where(X == 9, -np.inf, X), "y": Y}, "x .*-inf.*row 4"),
        ({"x": np.where(X == 9, 1e300, X), "y": Y}, r"x .*1e\+300.*row 4"),
        ({"x": X, "y": np.where(Y == 2, np.nan, Y)}, "y .*nan.*row 2.*5"),
        ({"x": X, "y": Y, "client": Y + 0.5}, "client .*float64"),
        ({"x": X, "y": Y, "client": np.array([b"\xff"] * 20)}, "UTF-8"),
        ({"x": X, "y": Y, "split": Y}, "split .*2 .*row 2"),
        ({"x": X, "y": Y, "split": Y * 0.0}, "split .*float64"),
        ({"x": X, "y": Y, "split": Y * 0 + 1}, "split .*1 .*row"),
    ],
)
def test_refuses(tmp_path, arrays, says):
    path = save(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=says) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)


def test_objects_are_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    path = save(tmp_path / "trap.npz", x=np.array([[Trap()]], dtype=object), y=np.zeros(1, int))
    with pytest.raises(InputError, match="objects"):
        read_npz(path)


def damaged(how: str) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **table())
    content = bytearray(buffer.getvalue())
    if how == "empty":
        return b""
    if how == "cut":
        return bytes(content[: len(content) // 2])
    if how == "flipped":
        content[200] ^= 0xFF
        return bytes(content)
    if how == "npy":
        buffer = io.BytesIO()
        np.save(buffer, X)
        return buffer.getvalue()
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        if how == "not arrays":
            archive.writestr("x.npy", b"hello")
            archive.writestr("y.npy", b"hello")
        else:  # a header that declares more than there is
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                header, {"descr": "<f8", "fortran_order": False, "shape": (10**15, 10**3)}
            )
            archive.writestr("x.npy", header.getvalue())
            archive.writestr("y.npy", header.getvalue())
    return buffer.getvalue()


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "npy", "not arrays", "too large"])
def test_refuses_damaged_files(tmp_path, how):
    path = tmp_path / "damaged.npz"
    path.write_bytes(damaged(how))
    with pytest.raises(InputError, match=r"savez|plain numbers"):
        read_npz(path)


def test_refuses_an_absent_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(InputError, match=r"absent|file"):
            read_npz(path)
