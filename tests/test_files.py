"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedhb.files import file_hash, hashed, write_atomically
from fedhb.runs import folder


@pytest.mark.parametrize("operation", ["os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_leaves_the_old_content(operation, tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_atomically(path, b"old")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(operation, fails)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer" and [p.name for p in path.parent.iterdir()] == ["file"]


def test_content_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The order that makes it safe: sync the content, rename, sync the folder."""
    order = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(folder.os, "fsync", lambda handle: (order.append("sync"), sync(handle)))
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (order.append("rename"), rename(self, target))
    )
    write_atomically(tmp_path / "file", b"content")
    assert order == ["sync", "rename", "sync"]


def test_the_hash_of_a_relative_path_is_that_of_the_file_in_the_current_folder(
    tmp_path, monkeypatch
):
    hashes = []
    for content in (b"one", b"two"):
        folder = tmp_path / content.decode()
        folder.mkdir()
        (folder / "data").write_bytes(content)
        os.utime(folder / "data", (0, 0))
        monkeypatch.chdir(folder)
        hashes.append(file_hash("data"))
    assert hashes == [hashed(b"one"), hashed(b"two")]
