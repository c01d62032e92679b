"""Tuning with the same budget for every method, on validation data, with seeds that no result uses: `fedhb tune SPACE.toml`.

    seeds = [100, 101]
    trials = 16                                     # of every method
    draw = 0                                        # seed of the draws
    [common]                                        # as in an experiment (fedhb_paper.cells)
    [cells.NAME]
    [[stages]]                                      # all trials in these cells,
    keep = 1.0
    cells = ["fashion-mnist tau=1"]
    [[stages]]                                      # then the best quarter in those, with another seed
    keep = 0.25
    cells = ["mnist tau=1"]
    seeds = [102]
    [shared]                                        # choices of every method that has such a setting
    lr = [0.03, 0.1, 0.3]
    [own.fedprox]                                   # choices of one method, also instead of shared ones
    mu = [0.01, 0.1]
    [start.shared]                                  # trial 0, which the others are compared with; else the present default.
    lr = 0.1                                        # Once what was chosen is the default, it should not be tuned twice
    [start.fedprox]
    mu = 0.01

Trials are drawn without repetition. The n-th draw has the same shared values for every method, so that none is luckier than
another, and the same ones whatever the defaults are, so that records stay valid when these change. The score of a trial is the
mean of the validation accuracies of global prediction and personalisation, over cells and seeds. Scores that agree to a tenth of
a percent, about the standard error of one of them, are ordered by NLL; all of them where targets are real numbers.
Trial 0 takes part in every stage: what it is compared with ran in the same cells.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedhb.algorithms import ALGORITHMS, build
from fedhb.errors import InputError
from fedhb.files import of_file, write_atomically
from fedhb.runs.settings import TRAINING, Settings, read_chosen, read_toml, toml_value
from fedhb.settings_fields import did_you_mean
from fedhb_paper import workbench
from fedhb_paper.experiments import Experiment
from fedhb_paper.records import Key

Choice = dict[str, Any]
"""A value for every setting of a method's space."""

NEEDED = ("seeds", "trials", "cells", "stages", "shared", "own")
REPORTED = {0, 1, 2}
"""Seeds of results everywhere."""


def reported(path: Path) -> set[Any]:
    """The seeds that an experiment reports results with; none where the file is of something else."""
    try:
        content = read_toml(path)
    except InputError:
        return set()
    common, cells = content.get("common", {}), content.get("cells", {})
    if (
        not (isinstance(common, dict) and isinstance(cells, dict))
        or common.get("evaluate_on") == "validation"
    ):
        return set()
    parts = [
        content,
        *(cell for cell in cells.values() if isinstance(cell, dict)),
    ]  # cells may have seeds of their own
    given = [part.get("seeds", []) for part in parts]
    return {
        seed
        for seeds in given
        for seed in (seeds if isinstance(seeds, list) else [seeds])
        if isinstance(seed, int)
    }


@dataclass(frozen=True)
class Space:
    """A SPACE.toml: its file and its content."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, trials: int | None = None) -> Space:
        """The file, after a check of what would spoil a comparison."""
        content = read_toml(path)
        for name in NEEDED:
            if name not in content:
                raise InputError(
                    f"{path} has no {name}: see the head of fedhb/tune.py for what it holds"
                )
        _check_kinds(path, content)
        seen = REPORTED.union(
            *(reported(p) for p in sorted(path.parent.parent.glob("*/settings.toml")))
        )
        for seed in {
            *content["seeds"],
            *(seed for stage in content["stages"] for seed in stage.get("seeds", [])),
        }:
            if seed in seen:
                raise InputError(
                    f"{path}: results are reported with seed {seed}: tune with others, such as 100 and 101"
                )
        layers = [content.get("common", {}), *content["cells"].values()]
        if any(layer.get("evaluate_on", "validation") != "validation" for layer in layers):
            raise InputError(f"{path}: evaluate_on must be validation: test data choose nothing")
        if not content["stages"]:
            raise InputError(
                f"{path}: stages is empty: give one at least, with keep = 1.0 and the cells to try all trials in"
            )
        for stage in content["stages"]:
            for cell in stage["cells"]:
                if cell not in content["cells"]:
                    raise InputError(
                        f"{path}: stages has {cell!r}{did_you_mean(cell, content['cells'])}: it is not among the cells"
                    )
            if not 0 < stage["keep"] <= 1:
                raise InputError(
                    f"{path}: keep={stage['keep']}: give the share of the trials in a stage, above 0 and at most 1"
                )
        if content["stages"][0]["keep"] != 1:
            raise InputError(
                f"{path}: the first stage keeps {content['stages'][0]['keep']} of the trials: it must keep all, 1.0"
            )
        known = set(TRAINING).union(
            *(vars(build(method)) for method in content["own"] if method in ALGORITHMS)
        )
        for name in content["shared"]:
            if name not in known:
                raise InputError(
                    f"{path}: shared has {name!r}{did_you_mean(name, known)}: no method here has such a setting to tune"
                )
        count = content["trials"] if trials is None else trials
        if count < 1:
            raise InputError(f"trials={count}: give at least 1, the present default")
        return cls(path, {**content, "trials": count})

    @property
    def methods(self) -> list[str]:
        """The methods that have a space."""
        return list(self.content["own"])

    @property
    def own_data(self) -> str:
        """The files of the user's that it tunes for, if any: then the choice is not for everybody."""
        layers = (self.content.get("common", {}), *self.content["cells"].values())
        return ", ".join(
            dict.fromkeys(of_file(layer["data"]) for layer in layers if layer.get("data"))
        )

    def comparison(self, chosen: Path) -> str:
        """The command that compares with what was chosen, where that is for own data with the same settings."""
        cells = list(self.content["cells"].values())
        common = (
            {**self.content.get("common", {}), **(cells[0] if len(cells) == 1 else {})}
            if self.own_data
            else {}
        )
        left = {"evaluate_on", "validation", *TRAINING}
        words = ["fedhb", "compare"]
        for name, value in common.items():
            if isinstance(value, Mapping):
                words += [
                    word for key, one in value.items() for word in ("--set", f"{name}.{key}={one}")
                ]
            elif name not in left:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--tuned", str(chosen)])

    def choices(self, method: str) -> dict[str, list[Any]]:
        """The choices of every setting of a method: the shared ones that it has, and its own."""
        fields = set(vars(build(method))) | set(TRAINING)
        shared = {name: values for name, values in self.content["shared"].items() if name in fields}
        return shared | dict(self.content["own"][method])

    def overrides(self, method: str, choice: Choice) -> dict[str, Any]:
        """A choice as a variant of an experiment."""
        run = {name: value for name, value in choice.items() if name in TRAINING}
        own = {name: value for name, value in choice.items() if name not in TRAINING}
        build(method, own)  # which refuses what the method does not have
        return {"algorithm": method, **run, **({method: own} if own else {})}

    def default(self, method: str) -> Choice:
        """What a method begins with: the space's `start` where it has one, else the present default."""
        settings, own = Settings.resolve(None, {"algorithm": method}), vars(build(method))
        start = {
            **self.content.get("start", {}).get("shared", {}),
            **self.content.get("start", {}).get(method, {}),
        }
        present = {
            name: getattr(settings, name) if name in TRAINING else own.get(name)
            for name in self.choices(method)
        }
        return {name: start.get(name, value) for name, value in present.items()}

    def draws(self, method: str) -> Iterator[Choice]:
        """Choices in the order in which they are tried, some of them again."""
        choices, draw = self.choices(method), self.content.get("draw", 0)
        shared = list(itertools.product(*self.content["shared"].values()))
        for n in np.random.default_rng([draw, 0]).permutation(len(shared)):
            named = dict(zip(self.content["shared"], shared[n], strict=True))
            rng = np.random.default_rng([draw, 1, int(n)])
            own = {
                name: values[rng.integers(len(values))]
                for name, values in self.content["own"][method].items()
            }
            yield {name: (named | own)[name] for name in choices}
        rest = list(itertools.product(*choices.values()))
        for n in np.random.default_rng([draw, 2]).permutation(len(rest)):
            yield dict(zip(choices, rest[n], strict=True))

    def trials(self, method: str) -> dict[int, Choice]:
        """The choices to try, by the number of their draw; 0 is the present default."""
        found, drawn = {0: self.default(method)}, []
        for choice in self.draws(method):
            if len(found) == self.content["trials"]:
                break
            if choice not in drawn:
                drawn.append(choice)
                if choice != found[0]:
                    found[len(drawn)] = choice
        if len(found) < self.content["trials"]:
            raise InputError(
                f"trials={self.content['trials']}: {method} has {len(found)} different choices with its default: "
                "give fewer trials, or more choices"
            )
        return found

    @cached_property
    def experiment(self) -> Experiment:
        """The trials as the variants of an experiment, whose records lie beside the file."""
        variants = {
            variant(method, n): self.overrides(method, choice)
            if n or "start" in self.content
            else {"algorithm": method}
            for method in self.methods
            for n, choice in self.trials(method).items()
        }
        common = {"validation": 0.1, **self.content.get("common", {}), "evaluate_on": "validation"}
        settings = {
            "kind": "table",
            "seeds": self.content["seeds"],
            "common": common,
            "cells": self.content["cells"],
        }
        return Experiment(self.path.parent, settings | {"variants": variants})


def _check_kinds(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse what is of another kind than the head of this module shows."""

    def check(name: str, right: bool, expected: str) -> None:
        if not right:
            raise InputError(
                f"{path}: {name} is not {expected}: see the head of fedhb/tune.py for what it holds"
            )

    def seeds(value: Any) -> bool:
        return isinstance(value, list) and all(type(seed) is int for seed in value)

    def choices(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(one, list) and one for one in value.values()
        )

    check("seeds", seeds(content["seeds"]) and bool(content["seeds"]), "a list of whole numbers")
    check("trials", type(content["trials"]) is int, "a whole number")
    for name in ("common", "cells", "own"):
        check(name, isinstance(content.get(name, {}), dict), "a table")
    for name in ("cells", "own"):
        for key, value in content[name].items():
            check(f"{name}.{key}", isinstance(value, dict), "a table")
    for name, one in (
        ("shared", content["shared"]),
        *((f"own.{key}", one) for key, one in content["own"].items()),
    ):
        check(name, choices(one), "a table of lists, none of them empty")
    stages = content["stages"]
    check(
        "stages",
        isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages),
        "a list of tables",
    )
    for stage in stages:
        check("keep of a stage", type(stage.get("keep")) in (int, float), "a number")
        check("cells of a stage", isinstance(stage.get("cells"), list), "a list of names")
        check("seeds of a stage", seeds(stage.get("seeds", [])), "a list of whole numbers")


def variant(method: str, trial: int) -> str:
    """The name of a trial."""
    return f"{method} {trial}"


@dataclass(frozen=True)
class Tuned:
    """What tuning found of a method: scores of the default and of the best trial (mean accuracies, or the mean NLL of real
    targets), the best choice, and how many were tried."""

    method: str
    metric: str
    default: float
    best: float
    choice: Choice
    changed: Choice
    trials: int


def tune(
    space: Space, methods: Sequence[str], processes: int, watcher: workbench.Watcher
) -> list[Tuned]:
    """Run the stages, best trials first to the next; every method has the same number of trials in every stage."""
    for method in methods:
        if method not in space.methods:
            raise InputError(
                f"{space.path} has no space for {method!r}{did_you_mean(method, space.methods)}: [own.{method}]"
            )
    kept = {method: list(space.trials(method)) for method in methods}
    scores: dict[str, list[tuple[float, float]]] = {}
    metric = "accuracy"
    for stage in space.content["stages"]:
        count = math.ceil(
            stage["keep"] * (space.content["trials"] - 1)
        )  # beside the one to compare with
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
        standing = workbench.complete(
            space.experiment, keys, processes, watcher, lambda key: again(space, key)
        )
        for record in standing.records:
            scores.setdefault(record["key"]["variant"], []).append(score(record["result"]))
            if "accuracy" not in record["result"].get("global", "accuracy"):
                metric = "nll"
    return [_tuned(space, method, kept[method], scores, metric) for method in methods]


def _mean(
    scores: Mapping[str, Sequence[tuple[float, float]]], method: str, trial: int
) -> tuple[float, ...]:
    """The mean score of a trial over what it has been through."""
    return tuple(
        statistics.fmean(column)
        for column in zip(*scores.get(variant(method, trial), []), strict=True)
    )


def _order(
    scores: Mapping[str, Sequence[tuple[float, float]]], method: str, trial: int
) -> tuple[float, ...]:
    """What trials are ordered by: the accuracy in steps of 0.1 %, then NLL; in the first stage nothing is known."""
    means = _mean(scores, method, trial)
    return (round(means[0], 3), *means[1:]) if means else means


def _tuned(
    space: Space,
    method: str,
    kept: Sequence[int],
    scores: Mapping[str, Sequence[tuple[float, float]]],
    metric: str,
) -> Tuned:
    means = {n: _mean(scores, method, n) for n in kept}
    best = min(kept, key=lambda n: (_order(scores, method, n), n))
    default, choice = space.default(method), space.trials(method)[best]
    changed = {name: value for name, value in choice.items() if value != default[name]}
    shown = {n: -accuracy if metric == "accuracy" else nll for n, (accuracy, nll) in means.items()}
    return Tuned(method, metric, shown[0], shown[best], choice, changed, space.content["trials"])


def score(result: Mapping[str, Any]) -> tuple[float, float]:
    """(minus the mean accuracy of both tasks, their mean NLL): the least is the best. A run that diverged is the worst.

    Real targets have no accuracy: there it is 0, and NLL decides.
    """
    if "diverged" in result:
        return 0.0, math.inf
    tasks = [result[task] for task in ("global", "personalised")]
    nll = sum(task["nll"] for task in tasks) / 2
    return -sum(task.get("accuracy", 0.0) for task in tasks) / 2, nll if math.isfinite(
        nll
    ) else math.inf


def again(space: Space, key: Key) -> str:
    """The command that makes a record again."""
    return f"fedhb tune {space.path} --trials {space.content['trials']} --algorithms {key['variant'].rpartition(' ')[0]}"


# ---- what is kept and shown


def write_chosen(path: Path, found: Sequence[Tuned], own_data: str = "") -> None:
    """The chosen settings of these methods; those of others that were tuned on the same data stay as the file has them."""
    before = read_chosen(path) if path.exists() else {}
    tables = {
        method: table for method, table in before.items() if table.get("data", "") == own_data
    }
    for one in found:
        training = {name: value for name, value in one.choice.items() if name in TRAINING}
        own = {name: value for name, value in one.choice.items() if name not in TRAINING}
        name = "score" if one.metric == "accuracy" else one.metric
        scores: dict[str, Any] = {
            name: round(one.best, 6),
            f"default_{name}": round(one.default, 6),
            "trials": one.trials,
        }
        scores |= {"data": own_data} if own_data else {}
        tables[one.method] = scores | {"training": training, "settings": own}
    lines = [
        "# Written by `fedhb tune`: what each method is trained with, and its own settings, chosen on validation data."
    ]
    for method in sorted(tables, key=list(ALGORITHMS).index):
        plain = {
            name: value for name, value in tables[method].items() if not isinstance(value, Mapping)
        }
        lines += [
            "",
            f"[{method}]",
            *(f"{name} = {toml_value(value)}" for name, value in plain.items()),
        ]
        for part in ("training", "settings"):
            lines += [
                f"[{method}.{part}]",
                *(f"{name} = {toml_value(value)}" for name, value in tables[method][part].items()),
            ]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def differences(chosen: Mapping[str, Any]) -> list[str]:
    """Where the defaults in the code are not those of a chosen.toml."""
    found = []
    for method, table in chosen.items():
        settings, own = Settings.resolve(None, {"algorithm": method}), vars(build(method))
        for part, present in (("training", vars(settings)), ("settings", own)):
            for name, value in table[part].items():
                if present.get(name) != value:
                    found.append(f"{method}: {name} is {present.get(name)}, chosen was {value}")
    return found


def table(found: Sequence[Tuned]) -> Table:
    """A line per method."""
    percent = all(one.metric == "accuracy" for one in found)
    title = "validation score, in %" if percent else "validation NLL"
    shown = Table(
        "method", "default", "best", "chosen instead of the default", "trials", title=title
    )
    for one in found:
        changes = ", ".join(f"{name}={value}" for name, value in one.changed.items())
        scores = [
            f"{100 * value:.2f}" if percent else f"{value:.3f}" for value in (one.default, one.best)
        ]
        shown.add_row(one.method, *scores, changes or "the default", str(one.trials))
    return shown
