"""A run's folder: settings, records, result and checkpoints, each written whole or not at all.

OUT/settings.toml            the resolved settings, with versions
OUT/problem.json             what the network and the federation are, for loading the run elsewhere
OUT/rounds.jsonl             one line per round
OUT/evaluated.jsonl          while it evaluates: the clients that are done
OUT/evaluation.json          what a report tells beside the result (evaluation/observe.py), written just before it
OUT/result.json              written once, at the end; its hash is in checkpoint/
OUT/checkpoint/              see checkpoint.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedhb.errors import InputError
from fedhb.files import as_json, hashed, named, unsealed, write_atomically

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there two runs on one folder are not caught
    fcntl = None  # type: ignore[assignment]


SETTINGS, EVALUATED, EVALUATION = "settings.toml", "evaluated.jsonl", "evaluation.json"
RESULT, RESULT_HASH = "result.json", "checkpoint/result.json"


class RunFolder:
    """The files of one run. Opening it for writing locks it: a second process on the same folder is refused."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: IO[bytes] | None = None
        self._records = hashlib.sha256()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoint"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return any((self.path / name).exists() for name in (SETTINGS, "rounds.jsonl", "result.json", "checkpoint"))

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
            except BlockingIOError:
                self._lock.close()
                raise InputError(f"{self.path} is in use by another process: wait for it, or choose another --out") from None
            except OSError:  # some file systems have no locks: as on Windows
                pass

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def refuse_run(self) -> None:
        """Refuse a folder that holds a run: a new one must not be mixed with it."""
        if self.holds_run:
            raise InputError(f"{self.path} already holds a run: resume it (--resume), or choose another --out")

    @contextlib.contextmanager
    def locked(self, new: bool = False) -> Iterator[None]:
        """The folder is this process's own for as long as this lasts; who holds it already goes on holding it.

        With `new` it must not hold a run: another process may have begun, and ended, one since that was asked before.
        """
        if self._lock is not None:
            yield
            return
        self.lock()
        try:
            if new:
                self.refuse_run()
            yield
        finally:
            self.unlock()

    @property
    def records(self) -> Path:
        """Where the records of the rounds are."""
        return self.path / "rounds.jsonl"

    def append_round(self, record: dict[str, Any]) -> None:
        """One more line in rounds.jsonl."""
        for key, value in record.items():
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(value)
                continue
            kind = type(value).__name__
            raise InputError(f"a round's record has {key!r} of type {kind}, which JSON cannot hold: add plain numbers and texts")
        line = (json.dumps(record) + "\n").encode()
        try:
            with self.records.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise named(error, self.records) from error
        self._records.update(line)

    def settle_rounds(self) -> str:
        """The hash of rounds.jsonl as it was written, once it is on the disk: a checkpoint must not know of rounds it lacks."""
        try:
            with self.records.open("ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise named(error, self.records) from error
        return self._records.hexdigest()

    def rounds(self) -> list[dict[str, Any]]:
        """The records of all rounds; a line cut short by a crash ends the list."""
        return [record for _, record in self._lines()]

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """The lines of rounds.jsonl, as they are and what they say, up to the first that is no record."""
        try:
            with self.records.open("rb") as file:
                for line in file:
                    record = json.loads(line.decode("utf-8"))
                    if not line.endswith(b"\n") or not isinstance(record, dict) or type(record.get("round")) is not int:
                        return
                    yield line, record
        except (FileNotFoundError, ValueError, RecursionError):
            return

    def records_until(self, done: int) -> str | None:
        """The hash of the records of rounds 1 to `done`; None where there is no file."""
        digest = hashlib.sha256()
        if not self.records.exists():
            return None
        for line, record in self._lines():
            if record["round"] <= done:
                digest.update(line)
        return digest.hexdigest()

    def keep_rounds(self, done: int) -> None:
        """Forget the records after round `done`, which will be run again."""
        kept = b"".join(line for line, record in self._lines() if record["round"] <= done)
        write_atomically(self.records, kept)
        self._records = hashlib.sha256(kept)

    def write(self, name: str, content: bytes) -> None:
        """A file of the run, written whole."""
        write_atomically(self.path / name, content)

    def write_result(self, content: bytes, asked: str = "") -> None:
        """result.json, after the hashes of it and of what was asked: wherever this stops, one that is not the last is seen."""
        self.write(RESULT_HASH, as_json({"sha256": hashed(content), "asked": asked}))
        self.write(RESULT, content)

    def answers(self, asked: str) -> bool:
        """Whether the folder holds the undamaged result of this evaluation, and of what was seen in it if anything was kept."""
        try:
            self.result()
            if (self.path / EVALUATION).exists():
                self.read_json(EVALUATION)
            return self.read_json(RESULT_HASH).get("asked") == asked
        except InputError:
            return False

    def result(self) -> dict[str, Any]:
        """What result.json holds, which must be what was written."""
        record = self.read_json(RESULT)
        written = self.read_json(RESULT_HASH) if (self.path / RESULT_HASH).exists() else None
        if written is not None and written.get("sha256") != hashed((self.path / RESULT).read_bytes()):
            raise InputError(
                f"{self.path / RESULT} is not as it was written: restore it, or resume the run (--resume) to make it anew"
            )
        return record

    def read_json(self, name: str, required: bool = False) -> dict[str, Any]:
        """A JSON file of the run, whose checksum is right; it may lack one unless that is required."""
        path = self.path / name
        try:
            return unsealed(path, required)
        except (FileNotFoundError, NotADirectoryError):
            runs = sorted(path.parent.name for path in self.path.glob(f"*/{name}")) if self.path.is_dir() else []
            where = (
                f"there are runs in it, such as {self.path / runs[0]}: give one"
                if runs
                else f"train with --out {self.path} first"
            )
            raise InputError(f"{self.path} holds no run ({name} is missing): {where}") from None
        except (ValueError, OSError) as error:
            raise InputError(
                f"{path} cannot be read ({error}): restore it, go on with the run (--resume), which writes it anew, "
                "or train again in another folder"
            ) from None
