"""Every round's numbers for the tools people already have: `--log csv`, `--log tensorboard`, or a `Callback` of your own.

class Mine(fedhb.Callback):
    def on_round(self, record, state):
        print(record["round"], record["loss"])

fedhb.fit(model, clients, callbacks=[Mine()])
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhb.engine.loop import Callback, State
from fedhb.errors import InputError
from fedhb.values import did_you_mean


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by name; those of a list or of a table as NAME/KEY."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            found |= scalars(dict(zip(map(str, range(len(value))), value, strict=True)), f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found


class CsvLog(Callback):
    """OUT/log.csv: a line per round, complete after every round. A resumed run goes on where the file's rounds are valid."""

    def __init__(self, folder: Path):
        self.path = folder / "log.csv"
        self._columns: list[str] = []

    def on_start(self, done: int, rounds: int) -> None:
        """Keep the lines of the rounds that are done; the others are run again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if done == 0 or not self.path.exists():
            self.path.unlink(missing_ok=True)
            return
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            self._columns = list(reader.fieldnames or [])
            kept = [row for row in reader if (row.get("round") or "").isdecimal() and int(row["round"]) <= done]
        self._write(kept, "w")

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """One more line."""
        row = scalars(record)
        if not self._columns:
            self._columns = list(row)
            self._write([row], "w")
        else:
            self._write([row], "a")

    def _write(self, rows: Sequence[Mapping[str, Any]], mode: str) -> None:
        with self.path.open(mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


class TensorBoardLog(Callback):
    """OUT/tensorboard: every number of every round, and those of the result. A resumed run hides the rounds that it repeats."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--log tensorboard needs the package tensorboard: pip install 'fedhb[tensorboard]'") from None
        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None
        self._rounds = 0

    def on_start(self, done: int, rounds: int) -> None:
        """Open the log."""
        self._rounds = rounds
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Every number, at its round."""
        for name, value in scalars(record).items():
            if name != "round":
                self._writer.add_scalar(name, value, record["round"])

    def on_end(self) -> None:
        """All that is there is on disk."""
        self._writer.flush()

    def on_result(self, result: Mapping[str, Any]) -> None:
        """The metrics of the result, at the last round."""
        for name, value in scalars({k: result[k] for k in ("global", "personalised", "holdout") if result.get(k)}).items():
            if "per_client" not in name:
                self._writer.add_scalar(f"result/{name}", value, self._rounds)
        self._writer.close()


LOGGERS = {"csv": CsvLog, "tensorboard": TensorBoardLog}


def make(names: Sequence[str], folder: Path) -> list[Callback]:
    """The loggers of these names (also with commas between them), writing to the folder of a run."""
    words = [word.strip() for name in names for word in name.split(",") if word.strip()]
    for word in words:
        if word not in LOGGERS:
            raise InputError(f"--log {word}{did_you_mean(word, LOGGERS)}: choose from {', '.join(LOGGERS)}")
    return [LOGGERS[word](folder) for word in dict.fromkeys(words)]
