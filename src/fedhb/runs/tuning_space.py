"""The space that `fedhb tune` searches: the file SPACE.toml, and the trials that are drawn from it.

    seeds = [100, 101]
    trials = 16                                     # of every method
    draw = 0                                        # seed of the draws
    [common]                                        # as in fedhb/runs/run_grid.py
    [cells.NAME]
    [[stages]]                                      # all trials in these cells,
    keep = 1.0
    cells = ["fashion-mnist tau=1"]
    [[stages]]                                      # then the best quarter in those,
    keep = 0.25                                     # with another seed
    cells = ["mnist tau=1"]
    seeds = [102]
    [shared]                                        # choices of every method with such a setting
    lr = [0.03, 0.1, 0.3]
    [own.fedprox]                                   # choices of one method, also instead of
    mu = [0.01, 0.1]                                # shared ones
    [start.shared]                                  # trial 0, which the others are compared with;
    lr = 0.1                                        # without it, the present default
    [start.fedprox]
    mu = 0.01

Trials are drawn without repetition. The n-th draw has the same shared values for every method, so
that no method is luckier than another. It does not depend on the defaults, so that records stay
valid when these change; once a choice has become the default, `start` keeps trial 0 as it was.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedhb.algorithms import ALGORITHMS, build
from fedhb.errors import InputError
from fedhb.files import of_file
from fedhb.runs.settings import TRAINING, Settings, read_toml
from fedhb.settings_fields import did_you_mean

Choice = dict[str, Any]
"""A value for every setting of a method's space."""

NEEDED = ("seeds", "trials", "cells", "stages", "shared", "own")
"""The keys that every space has."""

REPORTED = {0, 1, 2}
"""The seeds of results everywhere."""

SEE = "see the head of fedhb/runs/tuning_space.py for what it holds"


@dataclass(frozen=True)
class Space:
    """The file SPACE.toml and its content."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, trials: int | None = None) -> Space:
        """Read the file, and refuse what would spoil a comparison.

        Args:
            path: the file.
            trials: the number of trials of every method, instead of the file's own.
        """
        content = read_toml(path)
        for name in NEEDED:
            if name not in content:
                raise InputError(f"{path} has no {name}: {SEE}")
        _check_kinds(path, content)
        _check_seeds(path, content)
        layers = [content.get("common", {}), *content["cells"].values()]
        if any(layer.get("evaluate_on", "validation") != "validation" for layer in layers):
            raise InputError(f"{path}: evaluate_on must be validation: test data choose nothing")
        _check_stages(path, content)
        _check_shared(path, content)
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
        """The user's files that it tunes for, if any: then the choice is not for everybody."""
        layers = (self.content.get("common", {}), *self.content["cells"].values())
        files = [of_file(layer["data"]) for layer in layers if layer.get("data")]
        return ", ".join(dict.fromkeys(files))

    def comparison(self, chosen: Path) -> str:
        """Return the command that runs a comparison with the settings in the file `chosen`.

        It names the user's data and the settings of the space where it tunes for own data.
        """
        settings: dict[str, Any] = {}
        if self.own_data:
            cells = list(self.content["cells"].values())
            only_cell = cells[0] if len(cells) == 1 else {}
            settings = {**self.content.get("common", {}), **only_cell}
        words = ["fedhb", "compare"]
        for name, value in settings.items():
            if isinstance(value, Mapping):
                for key, entry in value.items():
                    words += ["--set", f"{name}.{key}={entry}"]
            elif name not in {"evaluate_on", "validation", *TRAINING}:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--tuned", str(chosen)])

    def choices(self, method: str) -> dict[str, list[Any]]:
        """Return the choices of every setting of a method: the shared ones it has, and its own."""
        fields = set(vars(build(method))) | set(TRAINING)
        shared = {name: values for name, values in self.content["shared"].items() if name in fields}
        return shared | dict(self.content["own"][method])

    def overrides(self, method: str, choice: Choice) -> dict[str, Any]:
        """Return a choice as a variant (see `fedhb.runs.run_grid`)."""
        training, settings = split(choice)
        build(method, settings)  # which refuses what the method does not have
        return {"algorithm": method, **training, **({method: settings} if settings else {})}

    def default(self, method: str) -> Choice:
        """Return what a method begins with: `start` of the space, else the present default."""
        settings = Settings.resolve(None, {"algorithm": method}).flat()
        fields = vars(build(method))
        tables = self.content.get("start", {})
        start = {**tables.get("shared", {}), **tables.get(method, {})}
        present = {
            name: settings[name] if name in TRAINING else fields.get(name)
            for name in self.choices(method)
        }
        return {name: start.get(name, value) for name, value in present.items()}

    def draws(self, method: str) -> Iterator[Choice]:
        """Yield choices in the order in which they are tried, some of them twice."""
        choices, draw = self.choices(method), self.content.get("draw", 0)
        shared = list(itertools.product(*self.content["shared"].values()))
        for n in np.random.default_rng([draw, 0]).permutation(len(shared)):
            values = dict(zip(self.content["shared"], shared[n], strict=True))
            rng = np.random.default_rng([draw, 1, int(n)])
            for name, options in self.content["own"][method].items():
                values[name] = options[rng.integers(len(options))]
            yield {name: values[name] for name in choices}
        rest = list(itertools.product(*choices.values()))
        for n in np.random.default_rng([draw, 2]).permutation(len(rest)):
            yield dict(zip(choices, rest[n], strict=True))

    def trials(self, method: str) -> dict[int, Choice]:
        """Return the choices to try, by the number of their draw; 0 is what it begins with."""
        trials, drawn = {0: self.default(method)}, []
        for choice in self.draws(method):
            if len(trials) == self.content["trials"]:
                break
            if choice not in drawn:
                drawn.append(choice)
                if choice != trials[0]:
                    trials[len(drawn)] = choice
        if len(trials) < self.content["trials"]:
            raise InputError(
                f"trials={self.content['trials']}: {method} has {len(trials)} different choices "
                "with its default: give fewer trials, or more choices"
            )
        return trials

    @cached_property
    def grid(self) -> dict[str, Any]:
        """The trials as variants in the cells of the space (see `fedhb.runs.run_grid`)."""
        variants = {
            variant(method, n): self.overrides(method, choice)
            if n or "start" in self.content
            else {"algorithm": method}
            for method in self.methods
            for n, choice in self.trials(method).items()
        }
        common = {"validation": 0.1, **self.content.get("common", {}), "evaluate_on": "validation"}
        return {"common": common, "cells": self.content["cells"], "variants": variants}


def variant(method: str, trial: int) -> str:
    """Return the name of a trial."""
    return f"{method} {trial}"


def split(choice: Choice) -> tuple[Choice, Choice]:
    """Return the settings of training in a choice, and those of the method."""
    training = {name: value for name, value in choice.items() if name in TRAINING}
    settings = {name: value for name, value in choice.items() if name not in TRAINING}
    return training, settings


# ---- checks of the file


def _check_kinds(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a value of another kind than the head of this module shows."""

    def check(name: str, right: bool, expected: str) -> None:
        if not right:
            raise InputError(f"{path}: {name} is not {expected}: {SEE}")

    def are_seeds(value: Any) -> bool:
        return isinstance(value, list) and all(type(seed) is int for seed in value)

    def are_choices(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(options, list) and options for options in value.values()
        )

    seeds = content["seeds"]
    check("seeds", are_seeds(seeds) and bool(seeds), "a list of whole numbers")
    check("trials", type(content["trials"]) is int, "a whole number")
    for name in ("common", "cells", "own"):
        check(name, isinstance(content.get(name, {}), dict), "a table")
    for name in ("cells", "own"):
        for key, value in content[name].items():
            check(f"{name}.{key}", isinstance(value, dict), "a table")
    tables = {"shared": content["shared"]}
    tables |= {f"own.{method}": table for method, table in content["own"].items()}
    for name, table in tables.items():
        check(name, are_choices(table), "a table of lists, none of them empty")
    stages = content["stages"]
    right = isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)
    check("stages", right, "a list of tables")
    for stage in stages:
        check("keep of a stage", type(stage.get("keep")) in (int, float), "a number")
        check("cells of a stage", isinstance(stage.get("cells"), list), "a list of names")
        check("seeds of a stage", are_seeds(stage.get("seeds", [])), "a list of whole numbers")


def _check_seeds(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse the seeds that results are reported with, here or in a neighbouring folder."""
    neighbours = sorted(path.parent.parent.glob("*/settings.toml"))
    seen = REPORTED.union(*(_reported_seeds(neighbour) for neighbour in neighbours))
    of_stages = [seed for stage in content["stages"] for seed in stage.get("seeds", [])]
    for seed in {*content["seeds"], *of_stages}:
        if seed in seen:
            raise InputError(
                f"{path}: results are reported with seed {seed}: "
                "tune with others, such as 100 and 101"
            )


def _reported_seeds(path: Path) -> set[int]:
    """Return the seeds that an experiment reports results with.

    There are none where the file is of something else.
    """
    try:
        content = read_toml(path)
    except InputError:
        return set()
    common, cells = content.get("common", {}), content.get("cells", {})
    if not (isinstance(common, dict) and isinstance(cells, dict)):
        return set()
    if common.get("evaluate_on") == "validation":
        return set()
    # cells may have seeds of their own
    tables = [content, *(cell for cell in cells.values() if isinstance(cell, dict))]
    lists = [table.get("seeds", []) for table in tables]
    return {
        seed
        for seeds in lists
        for seed in (seeds if isinstance(seeds, list) else [seeds])
        if isinstance(seed, int)
    }


def _check_stages(path: Path, content: Mapping[str, Any]) -> None:
    stages, cells = content["stages"], content["cells"]
    if not stages:
        raise InputError(
            f"{path}: stages is empty: give one at least, with keep = 1.0 and the cells to try "
            "all trials in"
        )
    for stage in stages:
        for cell in stage["cells"]:
            if cell not in cells:
                raise InputError(
                    f"{path}: stages has {cell!r}{did_you_mean(cell, cells)}: "
                    "it is not among the cells"
                )
        if not 0 < stage["keep"] <= 1:
            raise InputError(
                f"{path}: keep={stage['keep']}: give the share of the trials in a stage, "
                "above 0 and at most 1"
            )
    if stages[0]["keep"] != 1:
        raise InputError(
            f"{path}: the first stage keeps {stages[0]['keep']} of the trials: "
            "it must keep all, 1.0"
        )


def _check_shared(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a shared setting that no method of the space has."""
    methods = [method for method in content["own"] if method in ALGORITHMS]
    known = set(TRAINING).union(*(vars(build(method)) for method in methods))
    for name in content["shared"]:
        if name not in known:
            raise InputError(
                f"{path}: shared has {name!r}{did_you_mean(name, known)}: "
                "no method here has such a setting to tune"
            )
