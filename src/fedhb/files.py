"""Files that are written whole or not at all, and JSON with a checksum of itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedhb.errors import InputError

MOST_JSON = 2**29
"""The largest JSON file that is read: a manifest of a million clients has half as many bytes."""


def write_atomically(
    path: Path, content: bytes, settle: bool = True, private: bool = False
) -> None:
    """Write a file whole, or leave it as it was.

    The steps are: a temporary file, fsync, rename, fsync of the folder.

    Args:
        path: the file; its folder is made where it is missing.
        content: its bytes.
        settle: do the last step. Many files need it only once (`sync_folder`).
        private: let its owner alone read it, from its first byte on.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if private:
                temporary.unlink(missing_ok=True)
                temporary.touch(mode=0o600)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk needs the room
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise named(error, path) from error
    if settle:
        sync_folder(path.parent)


def check_unused(path: Path, remedy: str, resume: bool = False) -> None:
    """Refuse a file, and a folder that is not empty unless its content is resumed."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file: give a folder")
    if path.exists() and any(path.iterdir()) and not resume:
        raise InputError(f"{path} is not empty: {remedy}")


def sync_folder(path: Path) -> None:
    """Put the names in this folder on the disk."""
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def named(error: OSError, path: Path) -> OSError:
    """Return an error with the file's name, which that of a failed write lacks."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def as_json(value: Any, indent: int | None = 1) -> bytes:
    """Return a value as readable JSON, or as one line without `indent`."""
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()


def sealed(value: dict[str, Any], indent: int | None = 1) -> bytes:
    """Return a value as JSON with a checksum of itself, by which a changed byte is noticed."""
    return as_json(value | {"checksum": _checksum(value)}, indent)


def unsealed(path: Path, required: bool = True) -> dict[str, Any]:
    """Return the content of a JSON file whose checksum is right.

    Args:
        path: the file.
        required: whether a file without a checksum is refused.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not as it was written.
    """
    with path.open("rb") as file:
        content = file.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON} bytes")
    return unsealed_text(content, required)


def unsealed_text(content: bytes, required: bool = True) -> dict[str, Any]:
    """Return the content of the bytes of such a file, or of a line of one."""
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not what fedhb writes")
    if (required or "checksum" in value) and value.pop("checksum", None) != _checksum(value):
        raise ValueError("it does not match its checksum")
    return value


def _checksum(value: dict[str, Any]) -> str:
    return hashed(json.dumps(value, sort_keys=True).encode())


def hashed(content: bytes) -> str:
    """Return the sha256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def file_hash(path: str) -> str:
    """Return the sha256 of a file's content; empty where there is no file."""
    try:
        status = Path(path).stat()
        # the whole path, because a process may change its folder
        return _file_hash(str(Path(path).absolute()), status.st_mtime_ns, status.st_size)
    except OSError:
        return ""


def of_file(path: str) -> str:
    """Return a file's name and the first digits of its hash; empty for no file."""
    return f"{Path(path).name} {file_hash(path)[:12]}" if path else ""


@lru_cache
def _file_hash(path: str, *when: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
