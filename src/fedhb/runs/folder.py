"""A run's folder: settings, records, result and checkpoints, each written whole or not at all.

OUT/settings.toml            the resolved settings, with versions
OUT/problem.json             the network and the federation, for loading the run elsewhere
OUT/rounds.jsonl             one line per round
OUT/evaluated.jsonl          during the evaluation: the clients that are done
OUT/evaluation.json          what a report shows beside the result (evaluation/observer.py)
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
except ImportError:  # Windows has no such locks; there two runs on one folder are not noticed
    fcntl = None  # type: ignore[assignment]


SETTINGS, PROBLEM, ROUNDS = "settings.toml", "problem.json", "rounds.jsonl"
EVALUATED, EVALUATION = "evaluated.jsonl", "evaluation.json"
RESULT, RESULT_HASH = "result.json", "checkpoint/result.json"


class RunFolder:
    """The files of one run. A process that writes locks it: a second one is refused."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: IO[bytes] | None = None
        self._records = hashlib.sha256()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoint"

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return any((self.path / name).exists() for name in (SETTINGS, ROUNDS, RESULT, "checkpoint"))

    def lock(self) -> None:
        """Lock the folder for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("ab")
        except OSError as error:
            raise InputError(
                f"cannot write to {self.path}: {error.strerror or error}; choose another --out"
            ) from None
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise InputError(
                    f"{self.path} is in use by another process: wait for it, or choose another "
                    "--out"
                ) from None
            except OSError:  # some file systems have no locks, as Windows
                pass

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def claim(self, resume: bool) -> None:
        """Refuse a folder that holds a run, unless that is resumed."""
        if self.holds_run and not resume:
            raise InputError(
                f"{self.path} already holds a run: resume it (--resume), or choose another --out"
            )

    @contextlib.contextmanager
    def locked(self, new: bool = False) -> Iterator[None]:
        """Lock the folder while this lasts; a process that holds the lock already keeps it.

        With `new` the folder must not hold a run: another process may have started one since
        `claim`.
        """
        if self._lock is not None:
            yield
            return
        self.lock()
        try:
            self.claim(resume=not new)
            yield
        finally:
            self.unlock()

    @property
    def records(self) -> Path:
        """The file with the records of the rounds."""
        return self.path / ROUNDS

    def append_round(self, record: dict[str, Any]) -> None:
        """Add a line to rounds.jsonl."""
        for key, value in record.items():
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(value)
                continue
            raise InputError(
                f"a round's record has {key!r} of type {type(value).__name__}, which JSON cannot "
                "hold: add plain numbers and texts"
            )
        line = (json.dumps(record) + "\n").encode()
        try:
            with self.records.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise named(error, self.records) from error
        self._records.update(line)

    def settle_rounds(self) -> str:
        """Put rounds.jsonl on the disk and return its hash.

        A checkpoint must not know of rounds that the file lacks.
        """
        try:
            with self.records.open("ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise named(error, self.records) from error
        return self._records.hexdigest()

    def rounds(self) -> list[dict[str, Any]]:
        """Return the records of all rounds; a line that a crash cut short ends the list."""
        return [record for _, record in self._lines()]

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the lines of rounds.jsonl and their records, up to the first that is no record."""
        try:
            with self.records.open("rb") as file:
                for line in file:
                    record = json.loads(line.decode("utf-8"))
                    sound = isinstance(record, dict) and type(record.get("round")) is int
                    if not line.endswith(b"\n") or not sound:
                        return
                    yield line, record
        except (FileNotFoundError, ValueError, RecursionError):
            return

    def records_until(self, done: int) -> str | None:
        """Return the hash of the records of exchanges 1 to `done`; None where there is no file."""
        digest = hashlib.sha256()
        if not self.records.exists():
            return None
        for line, record in self._lines():
            if number_of(record) <= done:
                digest.update(line)
        return digest.hexdigest()

    def keep_rounds(self, done: int) -> None:
        """Remove the records after exchange `done`, which will be run again."""
        kept = b"".join(line for line, record in self._lines() if number_of(record) <= done)
        write_atomically(self.records, kept)
        self._records = hashlib.sha256(kept)

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the run whole."""
        write_atomically(self.path / name, content)

    def write_result(self, content: bytes, evaluated: str = "") -> None:
        """Write result.json after its hash and that of what was evaluated.

        Wherever this stops, a result that is not the last one is noticed.
        """
        self.write(RESULT_HASH, as_json({"sha256": hashed(content), "evaluated": evaluated}))
        self.write(RESULT, content)

    def answers(self, evaluated: str) -> bool:
        """Return whether the folder holds the undamaged result of this evaluation.

        evaluation.json must be undamaged too, where it is there.
        """
        try:
            self.result()
            if (self.path / EVALUATION).exists():
                self.read_json(EVALUATION)
            return self.read_json(RESULT_HASH).get("evaluated") == evaluated
        except InputError:
            return False

    def result(self) -> dict[str, Any]:
        """Return the content of result.json, which must be what was written."""
        record = self.read_json(RESULT)
        written = self.read_json(RESULT_HASH) if (self.path / RESULT_HASH).exists() else None
        content = (self.path / RESULT).read_bytes()
        if written is not None and written.get("sha256") != hashed(content):
            raise InputError(
                f"{self.path / RESULT} is not as it was written: restore it, or resume the run "
                "(--resume) to make it anew"
            )
        return record

    def read_json(self, name: str, required: bool = False) -> dict[str, Any]:
        """Return a JSON file of the run, whose checksum must be right.

        Args:
            name: of the file.
            required: whether it must have a checksum.
        """
        path = self.path / name
        try:
            return unsealed(path, required)
        except (FileNotFoundError, NotADirectoryError):
            inside = self.path.glob(f"*/{name}") if self.path.is_dir() else ()
            runs = sorted(path.parent.name for path in inside)
            where = f"train with --out {self.path} first"
            if runs:
                where = f"there are runs in it, such as {self.path / runs[0]}: give one"
            raise InputError(f"{self.path} holds no run ({name} is missing): {where}") from None
        except (ValueError, OSError) as error:
            raise InputError(
                f"{path} cannot be read ({error}): restore it, go on with the run (--resume), "
                "which writes it anew, or train again in another folder"
            ) from None


def number_of(record: dict[str, Any]) -> int:
    """Return the number of the exchange that a record is of: that of its round, without phases."""
    return int(record.get("exchange", record["round"]))
