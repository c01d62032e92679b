"""Logs of every round's numbers: `--log csv`, `--log tensorboard`, or a `Callback` of your own.

class Mine(fedhb.Callback):
    def on_round(self, record, state):
        print(record["round"], record["loss"])

fedhb.fit(model, clients, callbacks=[Mine()])
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhb.engine.loop import Callback, State
from fedhb.errors import InputError
from fedhb.files import write_atomically
from fedhb.settings_fields import did_you_mean


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record by name; those of a list or a table as NAME/KEY."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            numbers |= scalars({str(k): part for k, part in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = value
    return numbers


class CsvLog(Callback):
    """Writes OUT/log.csv: a line per round, complete after every round.

    A resumed run goes on where the file's rounds are valid.
    """

    def __init__(self, folder: Path):
        self.path = folder / "log.csv"
        self._columns: list[str] = []

    def on_start(self, done: int, rounds: int) -> None:
        """Keep the lines of the rounds that are done; the others are run again."""
        if done == 0:
            self.path.unlink(missing_ok=True)
        elif rows := self._rows():
            numbered = [row for row in rows if row.get("round", "").isdecimal()]
            self._rewrite([row for row in numbered if int(row["round"]) <= done])

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Add a line."""
        row = scalars(record)
        if more := [name for name in row if name not in self._columns]:  # new in this round
            rows = self._rows()
            self._columns += more
            self._rewrite([*rows, row])
        else:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            self._columns = list(reader.fieldnames or [])
            return [{key: row.get(key) or "" for key in self._columns} for row in reader]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue().encode())


class TensorBoardLog(Callback):
    """Writes OUT/tensorboard: every number of every round, and those of the result.

    A resumed run hides the rounds that it repeats.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "--log tensorboard needs the package tensorboard: pip install 'fedhb[tensorboard]'"
            ) from None
        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None
        self._rounds = 0

    def on_start(self, done: int, rounds: int) -> None:
        """Open the log."""
        self._rounds = rounds
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Write every number, at its round."""
        for name, value in scalars(record).items():
            if name != "round":
                self._writer.add_scalar(name, value, record["round"])

    def on_end(self) -> None:
        """Write everything to the disk."""
        self._writer.flush()

    def on_result(self, result: Mapping[str, Any]) -> None:
        """Write the metrics of the result, at the last round."""
        tasks = [task for task in ("global", "personalised", "holdout") if result.get(task)]
        for name, value in scalars({task: result[task] for task in tasks}).items():
            if "per_client" not in name:
                self._writer.add_scalar(f"result/{name}", value, self._rounds)
        self._writer.close()


LOGGERS = {"csv": CsvLog, "tensorboard": TensorBoardLog}


def make(names: Sequence[str], folder: Path) -> list[Callback]:
    """Return the loggers of these names, which write to the folder of a run.

    A name may be several with commas between them.
    """
    words = [word.strip() for name in names for word in name.split(",") if word.strip()]
    for word in words:
        if word not in LOGGERS:
            hint = did_you_mean(word, LOGGERS)
            raise InputError(f"--log {word}{hint}: choose from {', '.join(LOGGERS)}")
    return [LOGGERS[word](folder) for word in dict.fromkeys(words)]
