"""Run folders as plain data, and runs that differ in their seed alone as one method."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhb.engine.folder import EVALUATION, RunFolder
from fedhb.errors import InputError
from fedhb.figures import Style, styles

NOT_COMPARED = ("seed", "workers", "device", "checkpoint_every", "data")
"""Settings by which two runs of one method may differ."""
OF_THE_METHOD = ("algorithm", "lr", "momentum", "personal_lr", "personal_epochs")
"""Settings that belong to the method, not to the federation."""


@dataclass(frozen=True)
class RunData:
    """What a run's folder holds. `result` and `evaluation` are None where it is not finished, or is older than the file."""

    path: Path
    settings: dict[str, Any]
    versions: str
    rounds: list[dict[str, Any]]
    result: dict[str, Any] | None
    evaluation: dict[str, Any] | None

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.settings.get("algorithm", "unknown"))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings.get("seed", 0))

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The settings that make a method, the algorithm's own as ALGORITHM.NAME."""
        found: dict[str, Any] = {}
        for key, value in self.settings.items():
            if isinstance(value, dict):
                if key in (self.algorithm, "model"):
                    found |= {f"{key}.{name}": one for name, one in value.items()}
            elif key not in NOT_COMPARED:
                found[key] = value
        return found


@dataclass(frozen=True)
class Method:
    """Runs that differ in their seed alone."""

    name: str
    runs: Sequence[RunData]
    style: Style = field(default_factory=lambda: Style("#0072b2"))

    @property
    def first(self) -> RunData:
        """The run that details are shown of: the first with an evaluation, else the first."""
        return next((run for run in self.runs if run.evaluation), self.runs[0])

    @property
    def finished(self) -> list[RunData]:
        """The runs with a result."""
        return [run for run in self.runs if run.result is not None]


def read_run(path: Path) -> RunData:
    """A run from its folder."""
    folder = RunFolder(path)
    try:
        text = (path / "settings.toml").read_text(encoding="utf-8")
        settings = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path / 'settings.toml'} cannot be read ({error}): give the folder of a run") from None
    if type(settings.get("seed", 0)) is not int:
        raise InputError(f"{path / 'settings.toml'} has seed={settings['seed']!r}, which is no whole number: restore it")
    first = text.partition("\n")[0]
    result = folder.result() if (path / "result.json").exists() else None
    evaluation = folder.read_json(EVALUATION) if (path / EVALUATION).exists() else None
    return RunData(path, settings, first.partition("Versions: ")[2], folder.rounds(), result, evaluation)


def find(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs among these and, where one is none itself (a comparison), in it."""
    found: list[Path] = []
    for path in paths:
        if (path / "settings.toml").is_file() and (path / "rounds.jsonl").exists():
            found.append(path)
            continue
        inside = sorted(one.parent for one in path.glob("*/rounds.jsonl") if (one.parent / "settings.toml").is_file())
        if not inside:
            raise InputError(f"{path} holds no run: give a folder that `fedhb train` or `fedhb compare` has written")
        order = {name: k for k, name in enumerate(_compared(path))}
        found += sorted(inside, key=lambda one: (order.get(one.name.rpartition("-seed")[0], len(order)), one.name))
    return list(dict.fromkeys(path.resolve() for path in found))


def _compared(path: Path) -> list[str]:
    """The order of algorithms in a comparison."""
    try:
        return list(json.loads((path / "comparison.json").read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read(paths: Sequence[Path], tell: Callable[[Path], None] = lambda path: None) -> list[Method]:
    """The methods of these runs, in the order in which they first appear."""
    groups: dict[str, list[RunData]] = {}
    for path in find(paths):
        tell(path)
        run = read_run(path)
        groups.setdefault(json.dumps(run.compared, sort_keys=True), []).append(run)
    names = name_all([runs[0] for runs in groups.values()])
    style = styles(names, [runs[0].algorithm for runs in groups.values()])
    return [
        Method(name, sorted(runs, key=lambda run: run.seed), style[name])
        for name, runs in zip(names, groups.values(), strict=True)
    ]


def name_all(runs: Sequence[RunData]) -> list[str]:
    """A name for each: its algorithm, and where several have the same one, the settings by which they differ."""
    names = []
    for run in runs:
        others = [other for other in runs if other.algorithm == run.algorithm]
        keys = [key for key in run.compared if any(other.compared.get(key) != run.compared[key] for other in others)]
        own = ", ".join(f"{key.removeprefix(run.algorithm + '.')}={run.compared[key]}" for key in keys)
        names.append(f"{run.algorithm} {own}".strip())
    return [name if names.count(name) == 1 else f"{name} ({run.path.name})" for name, run in zip(names, runs, strict=True)]


def shared_settings(methods: Sequence[Method]) -> dict[str, Any]:
    """The settings of the federation that all runs have in common."""
    every = [run.compared for method in methods for run in method.runs]
    first = {key: value for key, value in every[0].items() if "." not in key and key not in OF_THE_METHOD}
    return {key: value for key, value in first.items() if all(one.get(key) == value for one in every)}
