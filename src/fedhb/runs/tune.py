"""Tuning on validation data, with the same budget for every method: `fedhb tune SPACE.toml`.

The settings to try, and the seeds, which no result uses, are those of a `Space`. Every stage runs
the best trials of the stage before it, in cells of its own; trial 0, which the others are compared
with, takes part in all. The score of a trial is the mean of the validation accuracies of global
prediction and personalisation, over cells and seeds. Scores that agree to a tenth of a percent,
about the standard error of one of them, are ordered by NLL; all of them where targets are real
numbers. The records lie beside the file, in records.jsonl.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedhb.algorithms import ALGORITHMS, build
from fedhb.errors import InputError
from fedhb.files import write_atomically
from fedhb.runs.from_settings import train
from fedhb.runs.jobs import Tell, Watcher, Work, record_all
from fedhb.runs.progress import TellRounds
from fedhb.runs.records import FILE, Inventory, Key, identity
from fedhb.runs.run_grid import dataset_of, missing_data, resolved, settings_of, with_defaults
from fedhb.runs.settings import Settings, read_chosen, toml_value
from fedhb.runs.tuning_space import Choice, Space, split, variant
from fedhb.settings_fields import did_you_mean

Score = tuple[float, float]
"""Minus the mean accuracy of both tasks, and their mean NLL: the least score is the best."""

Scores = Mapping[str, Sequence[Score]]
"""The scores of every trial, by its name, one for each of its records."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning for one method.

    Attributes:
        method: its name.
        metric: "accuracy", or "nll" where targets are real numbers.
        default: the score of trial 0, the mean of the metric.
        best: that of the best trial.
        choice: the settings of the best trial.
        changed: those of them that are not as in trial 0.
        trials: how many trials there were.
    """

    method: str
    metric: str
    default: float
    best: float
    choice: Choice
    changed: Choice
    trials: int


def tune(space: Space, methods: Sequence[str], processes: int, watcher: Watcher) -> list[Tuned]:
    """Run the stages; every method has the same number of trials in each."""
    for method in methods:
        if method not in space.methods:
            raise InputError(
                f"{space.path} has no space for {method!r}"
                f"{did_you_mean(method, space.methods)}: [own.{method}]"
            )
    kept = {method: list(space.trials(method)) for method in methods}
    scores: dict[str, list[Score]] = {}
    metric = "accuracy"
    for stage in space.content["stages"]:
        count = math.ceil(stage["keep"] * (space.content["trials"] - 1))  # besides trial 0
        for method in methods:
            best = sorted((n for n in kept[method] if n), key=partial(_order, scores, method))
            kept[method] = [0, *best[:count]]
        keys: list[Key] = [
            {"cell": cell, "variant": variant(method, n), "seed": seed}
            for seed in stage.get("seeds", space.content["seeds"])
            for cell in stage["cells"]
            for method in methods
            for n in kept[method]
        ]
        for record in _records(space, keys, processes, watcher):
            scores.setdefault(record["key"]["variant"], []).append(score(record["result"]))
            if "accuracy" not in record["result"].get("global", "accuracy"):
                metric = "nll"
    return [_tuned(space, method, kept[method], scores, metric) for method in methods]


def _records(
    space: Space, keys: Sequence[Key], processes: int, watcher: Watcher
) -> list[dict[str, Any]]:
    """Return the records of these keys; those that are missing are made first."""
    folder, grid = space.path.parent, space.grid
    wanted = [(key, resolved(grid, key)) for key in keys]

    def inventory() -> Inventory:
        return Inventory.of(folder / FILE, wanted, with_defaults)

    present = inventory()
    for name, remedy in missing_data(
        present.settings[identity(key)] for key in present.missing
    ).items():
        raise InputError(
            f"{folder.name} needs the data set {name}: {remedy}; or leave out the cells with it"
        )
    work = Work(folder, run, grid, partial(command, space))
    record_all(work, present, processes, watcher)
    return inventory().records


def run(grid: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train one trial in one cell, and return its result on validation data."""
    settings = settings_of(grid, key)
    trained = train(
        settings,
        folder,
        resume=True,
        dataset=dataset_of(settings.data.dataset, settings.data.file),
        progress=False,
        callbacks=[TellRounds(tell, 0.9)],
    )
    kept = ("global", "personalised", "seconds", "dataset", "data")
    return {name: trained.result[name] for name in kept}


def command(space: Space, key: Key) -> str:
    """Return the command that makes a record again."""
    method = key["variant"].rpartition(" ")[0]
    return f"fedhb tune {space.path} --trials {space.content['trials']} --algorithms {method}"


# ---- scores


def score(result: Mapping[str, Any]) -> Score:
    """Return the score of one run. A run that diverged is the worst.

    Real targets have no accuracy: there it is 0, and NLL decides.
    """
    if "diverged" in result:
        return 0.0, math.inf
    tasks = [result[task] for task in ("global", "personalised")]
    accuracy = sum(task.get("accuracy", 0.0) for task in tasks) / 2
    nll = sum(task["nll"] for task in tasks) / 2
    return -accuracy, nll if math.isfinite(nll) else math.inf


def _mean(scores: Scores, method: str, trial: int) -> tuple[float, ...]:
    """Return the mean score of a trial over its records; nothing where it has none yet."""
    columns = zip(*scores.get(variant(method, trial), []), strict=True)
    return tuple(statistics.fmean(column) for column in columns)


def _order(scores: Scores, method: str, trial: int) -> tuple[float, ...]:
    """Return what trials are ordered by: the accuracy in steps of 0.1 %, then NLL."""
    means = _mean(scores, method, trial)
    return (round(means[0], 3), *means[1:]) if means else means


def _tuned(space: Space, method: str, kept: Sequence[int], scores: Scores, metric: str) -> Tuned:
    means = {n: _mean(scores, method, n) for n in kept}
    best = min(kept, key=lambda n: (_order(scores, method, n), n))
    default, choice = space.default(method), space.trials(method)[best]
    changed = {name: value for name, value in choice.items() if value != default[name]}
    shown = {n: -accuracy if metric == "accuracy" else nll for n, (accuracy, nll) in means.items()}
    return Tuned(method, metric, shown[0], shown[best], choice, changed, space.content["trials"])


# ---- the file of chosen settings


def write_chosen(path: Path, results: Sequence[Tuned], own_data: str = "") -> None:
    """Write the chosen settings of these methods.

    Those of other methods that were tuned on the same data stay as the file has them.
    """
    present = read_chosen(path) if path.exists() else {}
    tables = {
        method: table for method, table in present.items() if table.get("data", "") == own_data
    }
    for tuned in results:
        training, settings = split(tuned.choice)
        name = "score" if tuned.metric == "accuracy" else tuned.metric
        scores: dict[str, Any] = {
            name: round(tuned.best, 6),
            f"default_{name}": round(tuned.default, 6),
            "trials": tuned.trials,
        }
        scores |= {"data": own_data} if own_data else {}
        tables[tuned.method] = scores | {"training": training, "settings": settings}
    lines = [
        "# Written by `fedhb tune`: what each method is trained with, and its own settings, "
        "chosen on validation data."
    ]
    for method in sorted(tables, key=list(ALGORITHMS).index):
        lines += ["", f"[{method}]"]
        lines += _entries(tables[method])
        for part in ("training", "settings"):
            lines += [f"[{method}.{part}]", *_entries(tables[method][part])]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _entries(table: Mapping[str, Any]) -> list[str]:
    """Return the values of a table as lines of TOML, without the tables in it."""
    return [
        f"{name} = {toml_value(value)}"
        for name, value in table.items()
        if not isinstance(value, Mapping)
    ]


def differences(chosen: Mapping[str, Any]) -> list[str]:
    """Return the settings in a chosen.toml that are not the defaults of the code."""
    texts = []
    for method, table in chosen.items():
        training = Settings.resolve(None, {"algorithm": method}).flat()
        for part, present in (("training", training), ("settings", vars(build(method)))):
            for name, value in table[part].items():
                if present.get(name) != value:
                    texts.append(f"{method}: {name} is {present.get(name)}, chosen was {value}")
    return texts
