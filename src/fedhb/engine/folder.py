"""A run's folder: settings, records, result and checkpoints, each written whole or not at all.

OUT/settings.toml            the resolved settings, with versions
OUT/problem.json             what the network and the federation are, for loading the run elsewhere
OUT/rounds.jsonl             one line per round
OUT/result.json              written once, at the end
OUT/evaluation.json          what a report tells beside it (evaluation/observe.py), written just before
OUT/checkpoint/              see checkpoint.py
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedhb.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there two runs on one folder are not caught
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, content: bytes) -> None:
    """A file with this content, or the file as it was before: temporary file, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def as_json(value: Any) -> bytes:
    """Readable JSON."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


class RunFolder:
    """The files of one run. Opening it for writing locks it: a second process on the same folder is refused."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: IO[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoint"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return any((self.path / name).exists() for name in ("settings.toml", "rounds.jsonl", "result.json", "checkpoint"))

    def lock(self) -> None:
        """Claim the folder for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("ab")
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror or error}; choose another --out") from None
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise InputError(f"{self.path} is in use by another process: wait for it, or choose another --out") from None

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The folder is this process's own for as long as this lasts; who holds it already goes on holding it."""
        if self._lock is not None:
            yield
            return
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def append_round(self, record: dict[str, Any]) -> None:
        """One more line in rounds.jsonl."""
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """The records of all rounds; a line cut short by a crash ends the list."""
        records: list[dict[str, Any]] = []
        path = self.path / "rounds.jsonl"
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def keep_rounds(self, done: int) -> None:
        """Forget the records after round `done`, which will be run again."""
        kept = [r for r in self.rounds() if r["round"] <= done]
        write_atomically(self.path / "rounds.jsonl", "".join(json.dumps(r) + "\n" for r in kept).encode())

    def write(self, name: str, content: bytes) -> None:
        """A file of the run, written whole."""
        write_atomically(self.path / name, content)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run."""
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"{self.path} holds no finished run ({name} is missing): train with --out {self.path} first"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}): restore it or train again in another folder") from None
        if not isinstance(value, dict):
            raise InputError(f"{path} is not what fedhb writes: restore it or train again in another folder")
        return value
