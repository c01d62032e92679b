"""The folders of `experiments/`: one per table or figure of the paper.

NAME/settings.toml     title, kind, seeds, and what the kind needs (for most: common settings,
                       cells, variants)
NAME/printed.csv       the paper's numbers: cell, algorithm, task, metric, mean, std
NAME/records.jsonl     ours, a line per record
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from fedhb.errors import InputError
from fedhb.runs import records
from fedhb.runs.records import Key
from fedhb.runs.settings import read_toml
from fedhb.settings_fields import did_you_mean
from fedhb_paper import scale
from fedhb_paper.scale import Scale

KINDS = {
    "table": "fedhb_paper.table",
    "convergence": "fedhb_paper.convergence",
    "novel": "fedhb_paper.novel_users",
    "costs": "fedhb_paper.costs",
    "theorem_convergence": "fedhb_paper.theorem_convergence",
    "theorem_generalisation": "fedhb_paper.theorem_generalisation",
}
"""The module of every kind, imported when it is needed."""

COLUMNS = ("cell", "algorithm", "task", "metric", "mean", "std")


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its folder and its settings."""

    path: Path
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name, which is that of the folder."""
        return self.path.name

    @property
    def title(self) -> str:
        """The title, in words."""
        return str(self.settings.get("title", ""))

    @cached_property
    def kind(self) -> ModuleType:
        """The module that runs and shows the experiment."""
        kind = self.settings.get("kind", "")
        if kind not in KINDS:
            raise InputError(
                f"{self.path}/settings.toml: kind={kind!r}{did_you_mean(kind, KINDS)}: "
                f"choose from {', '.join(KINDS)}"
            )
        try:
            return importlib.import_module(KINDS[kind])
        except ModuleNotFoundError as error:
            if error.name != KINDS[kind]:
                raise
            raise InputError(
                f"{self.name}: this version of fedhb has no kind {kind!r} yet: "
                "choose another experiment"
            ) from None

    def with_seeds(self, seeds: Sequence[int]) -> Experiment:
        """Return this experiment with these seeds in every cell."""
        cells = {
            name: {key: value for key, value in cell.items() if key != "seeds"}
            for name, cell in self.settings.get("cells", {}).items()
        }
        return replace(
            self,
            settings={**self.settings, "seeds": list(seeds), **({"cells": cells} if cells else {})},
        )

    def scaled(self, scales: Sequence[Scale]) -> Experiment:
        """Return this experiment with every cell at each of these scales."""
        return replace(self, settings=scale.scaled(self.settings, scales))

    def recorded_scales(self) -> list[Scale]:
        """Return the scales that there are records of, besides that of the cells as they are."""
        scales = {scale.parse(str(key.get("cell", "")))[1] for key in self._recorded}
        changed = [each for each in scales if each.changes]
        return sorted(changed, key=lambda each: (each.width, each.rounds))

    def with_recorded_scales(self) -> Experiment:
        """Return this experiment with every cell also at the scales that there are records of."""
        scales = self.recorded_scales()
        return self.scaled([Scale(), *scales]) if scales else self

    def with_recorded_seeds(self) -> Experiment:
        """Return this experiment with every seed that there are records of."""
        return self.with_seeds(sorted({key["seed"] for key in self._recorded if "seed" in key}))

    @cached_property
    def _recorded(self) -> list[Key]:
        return [record["key"] for record in records.read(self.path / "records.jsonl")]

    def printed(self) -> list[dict[str, Any]]:
        """Return the paper's numbers (see `read_printed`)."""
        return read_printed(self.path / "printed.csv")

    def resolved(self, key: Key) -> dict[str, Any]:
        """Return everything that a record depends on, as its kind says.

        Else it is all settings but those that only choose or name records.
        """
        if hasattr(self.kind, "resolved"):
            return dict(self.kind.resolved(self.settings, key))
        return {
            name: value for name, value in self.settings.items() if name not in ("title", "seeds")
        }


def find_folder(given: Path | None) -> Path:
    """Return the folder of the experiments.

    It is the given one, else `experiments` beside fedhb's pyproject.toml, from here upward.
    """
    if given is not None:
        if not given.is_dir():
            raise InputError(
                f"--folder {given}: there is no such folder: give that of the experiments"
            )
        return given
    here = Path.cwd()
    for place in (here, *here.parents):
        project = place / "pyproject.toml"
        if (
            (place / "experiments").is_dir()
            and project.is_file()
            and read_toml(project).get("project", {}).get("name") == "fedhb"
        ):
            return place / "experiments"
    raise InputError(
        f"no experiments above {here}: run this in a clone of fedhb's repository, "
        "or give --folder EXPERIMENTS"
    )


def names(folder: Path) -> list[str]:
    """Return the names of the experiments in the folder."""
    return sorted(path.parent.name for path in folder.glob("*/settings.toml"))


def load(folder: Path, name: str) -> Experiment:
    """Return an experiment by its name."""
    known = names(folder)
    if name not in known:
        raise InputError(
            f"unknown experiment {name!r}{did_you_mean(name, known)}: "
            f"{folder} has {', '.join(known) or 'none'}"
        )
    return Experiment(folder / name, read_toml(folder / name / "settings.toml"))


def read_printed(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a printed.csv; none where there is no file.

    `mean` is a number, or the text of a formula; `std` is None where none is printed.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise InputError(
                f"{path}: its columns are {reader.fieldnames}: they must be {', '.join(COLUMNS)}"
            )
        rows: list[dict[str, Any]] = [dict(row) for row in reader]
    for row in rows:
        row["mean"], row["std"] = _number(row["mean"]), _number(row["std"])
    return rows


def _number(text: str | None) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text  # a formula


def choose(
    experiment: Experiment,
    datasets: Sequence[str] = (),
    cells: Sequence[str] = (),
    algorithms: Sequence[str] = (),
) -> list[Key]:
    """Return the keys of the records that are asked for; without a name, all of them.

    A cell is chosen by its name, at any scale, or by parts of it: "s=100,tau=1" is every cell with
    both words. A name that chooses nothing is an error.
    """
    keys = list(experiment.kind.work(experiment.settings))
    variants = experiment.settings.get("variants", {})

    def variant(key: Key) -> str:
        return str(key.get("variant", ""))

    def algorithm(key: Key) -> str:
        return str(variants.get(variant(key), {}).get("algorithm", variant(key)))

    def has(part: str) -> Callable[[Key], str]:
        return lambda key: (
            part if set(_parts(part)) <= set(_parts(str(key.get("cell", "")))) else ""
        )

    for option, words, readings in (
        ("--dataset", datasets, [lambda key: str(experiment.resolved(key).get("dataset", ""))]),
        ("--cell", cells, [lambda key: scale.parse(str(key.get("cell", "")))[0], *map(has, cells)]),
        # a variant of that name, else all of that algorithm
        ("--algorithms", algorithms, [variant, algorithm]),
    ):
        if not words:
            continue
        names = [[reading(key) for key in keys] for reading in readings]
        wanted: set[int] = set()
        for word in words:
            chosen: set[int] = set()
            for column in names:  # the first reading that chooses something counts
                chosen = chosen or {n for n, name in enumerate(column) if name == word}
            if not chosen:
                known = list(dict.fromkeys(name for column in names for name in column if name))
                raise InputError(
                    f"{option} {word}{did_you_mean(word, known)}: "
                    f"{experiment.name} has {', '.join(known)}"
                )
            wanted |= chosen
        keys = [key for n, key in enumerate(keys) if n in wanted]
    return keys


def _parts(cell: str) -> list[str]:
    """Return the words of a cell's name, which may have commas between them."""
    return [word for word in re.split(r"[,\s]+", cell) if word]
