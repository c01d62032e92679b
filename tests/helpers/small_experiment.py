"""A small experiment of digits: its settings, running it, and reading its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedhb_paper import experiments, workbench

COMMON = """
[common]
num_clients = 8
shards_per_client = 3
fraction = 0.5
rounds = 3
batch_size = 30
personal_epochs = 1
model = {hidden = 8}
"""

SETTINGS = f"""
title = "digits, small"
kind = "table"
seeds = [0, 1]
{COMMON}
[cells.one]
dataset = "digits"
[cells."two epochs"]
dataset = "digits"
local_epochs = 2
[variants]
niw = {{}}
"niw S=0" = {{algorithm = "niw", niw = {{num_samples = 0}}}}
fedavg = {{}}
"""

PRINTED = """cell,algorithm,task,metric,mean,std
one,niw,global,accuracy,97.80,0.12
one,fedavg,global,accuracy,97.16,
two epochs,niw,personalised,accuracy,98.00,1.50
"""


def write(
    folder: Path, settings: str = SETTINGS, name: str = "small", printed: str = PRINTED
) -> Path:
    """The folder of the experiments, with one in it."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "settings.toml").write_text(settings)
    if printed:
        (place / "printed.csv").write_text(printed)
    return folder


class Silent:
    """A watcher that shows nothing and keeps the records."""

    """A watcher that remembers."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.todo: int | None = None

    def begin(self, todo: int) -> None:
        self.todo = todo

    def tell(self, job: Any, share: float, text: str) -> None:
        assert 0 <= share <= 1 and text

    def recorded(self, record: Any) -> None:
        self.made.append(record)


def complete(
    folder: Path, processes: int = 1, name: str = "small", **choice: Any
) -> tuple[Silent, Any]:
    """Run what is chosen of the experiment: (the watcher, its records)."""
    experiment = experiments.load(folder, name)
    watcher = Silent()
    now = workbench.complete(
        experiment, experiments.choose(experiment, **choice), processes, watcher
    )
    return watcher, now


def lines(folder: Path) -> list[Any]:
    """The recorded lines."""
    return [json.loads(line) for line in (folder / "small/records.jsonl").read_text().splitlines()]


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record without its times."""
    result = {key: value for key, value in record["result"].items() if key != "seconds"}
    return {**{key: value for key, value in record.items() if key != "seconds"}, "result": result}
