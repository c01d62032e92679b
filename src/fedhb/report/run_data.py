"""Run folders as plain data, and runs that differ in their seed alone as one method."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhb.errors import InputError, reason
from fedhb.report.figures import Style, styles
from fedhb.runs.folder import EVALUATION, PROBLEM, RunFolder

NOT_COMPARED = ("seed", "workers", "device", "checkpoint_every", "data")
"""Settings by which two runs of one method may differ; of the data it is not the path that counts (`RunData.trained_on`)."""
OF_THE_METHOD = ("algorithm", "lr", "momentum", "personal_lr", "personal_epochs")
"""Settings that belong to the method, not to the federation."""
NONSENSE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
"""What files raise that hold something else than fedhb writes."""
NODES = "nodes"
"""What a federation's result calls data that every node has of its own."""


@dataclass(frozen=True)
class RunData:
    """What a run's folder holds. `result` and `evaluation` are None where it is not finished, or is older than the file."""

    path: Path
    settings: dict[str, Any]
    versions: str
    rounds: list[dict[str, Any]]
    result: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    problem: dict[str, Any] = field(default_factory=dict)
    """What problem.json tells of the network and the federation; empty where there is none."""

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.settings.get("algorithm", "unknown"))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings.get("seed", 0))

    @property
    def dataset(self) -> str:
        """The name of what it was trained on: of a file of one's own that of the file, whatever `dataset` is left at."""
        own = self.settings.get("data")
        return Path(str(own)).stem if own else str(self.settings.get("dataset") or "data")

    @property
    def likelihood(self) -> str:
        """The likelihood, which says what a score is: categorical or gaussian; empty where it is another, or is not known."""
        if "likelihood" in self.problem:
            kind = str(self.problem["likelihood"]["kind"])
            return kind if kind in ("categorical", "gaussian") else ""
        metrics = (self.result or {}).get("global") or {}
        return "categorical" if "accuracy" in metrics else "gaussian" if "rmse" in metrics else ""

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The settings that make a method, the algorithm's own as ALGORITHM.NAME."""
        found: dict[str, Any] = {}
        for key, value in self.settings.items():
            if isinstance(value, dict):
                if key in (self.algorithm, "model"):
                    found |= {f"{key}.{name}": one for name, one in value.items()}
            elif key not in NOT_COMPARED:
                found[key] = self.dataset if key == "dataset" else value
        if self.settings.get("data") and self.named_by_data:  # then nobody asked for `num_clients`
            novel = self.settings.get("holdout_clients", 0)
            found["num_clients"] = (
                self.num_clients + novel if self.num_clients else "as in the data"
            )
        return found

    @property
    def named_by_data(self) -> bool:
        """Whether the data may have named the clients: their file, or on Flower the nodes."""
        own = self.settings.get("data") or (self.result or {}).get("dataset") == NODES
        return bool(own) and self.settings.get("partition", "") in ("", "natural")

    @property
    def num_clients(self) -> int:
        """How many clients train; 0 where the folder does not tell."""
        if "federation" in self.problem:
            return int(self.problem["federation"]["num_clients"])
        if self.evaluation:
            return len(self.evaluation["clients"]["client"])
        return 0 if self.named_by_data else int(self.settings.get("num_clients", 0))

    @cached_property
    def trained_on(self) -> dict[str, Any]:
        """Which data, network and likelihood, as far as the folder tells and no seed changes it: settings name them at most."""
        result, problem = self.result or {}, self.problem
        found: dict[str, Any] = {
            key: problem[key]
            for key in ("model", "head", "batch_norm", "input_shape")
            if key in problem
        }
        if (
            "likelihood" in problem
        ):  # what targets are scaled by depends on who is held out, and so on the seed
            own = problem["likelihood"]
            found["likelihood"] = (
                own["kind"],
                {k: v for k, v in own["settings"].items() if k not in ("centre", "scale", "noise")},
            )
        if result.get("data"):
            found["data"] = sorted(result["data"].values())
        elif result:  # arrays, which have no hash
            found["data"] = problem.get("federation")
        if result:
            found["split"], found["title"] = result.get("split"), result.get("dataset")
        if self.evaluation:
            found["network"] = self.evaluation["network"]
        if (
            self.rounds and "model" in problem and problem["model"] is None
        ):  # a module of one's own, known by its class alone
            found["sent"] = self.rounds[0].get("down_bytes")
        return found

    def differs_in_seed_alone(self, other: RunData) -> bool:
        """Whether both are runs of one method, and not the same one twice. What is known of one of them alone tells nothing."""
        mine, theirs = self.trained_on, other.trained_on
        same = all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())
        return same and self.compared == other.compared and self.seed != other.seed


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
        raise InputError(
            f"{path / 'settings.toml'} cannot be read ({error}): give the folder of a run"
        ) from None
    if type(settings.get("seed", 0)) is not int:
        raise InputError(
            f"{path / 'settings.toml'} has seed={settings['seed']!r}, which is no whole number: restore it"
        )
    first = text.partition("\n")[0]
    result = folder.result() if (path / "result.json").exists() else None
    evaluation = folder.read_json(EVALUATION) if (path / EVALUATION).exists() else None
    problem = folder.read_json(PROBLEM) if (path / PROBLEM).exists() else {}
    return RunData(
        path,
        settings,
        first.partition("Versions: ")[2],
        folder.rounds(),
        result,
        evaluation,
        problem,
    )


def senseless(path: Path, error: BaseException) -> InputError:
    """What to say of a run whose files can be read, but lack what fedhb writes or hold something else in its place."""
    what = f"{type(error).__name__}: {reason(error)}"
    return InputError(
        f"{path}: its files do not hold what fedhb writes ({what}): restore them, or leave this run out"
    )


def find(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs among these and, where one is none itself (a comparison), in it."""
    found: list[Path] = []
    for path in paths:
        if (path / "settings.toml").is_file() and (path / "rounds.jsonl").exists():
            found.append(path)
            continue
        inside = sorted(
            one.parent
            for one in path.glob("*/rounds.jsonl")
            if (one.parent / "settings.toml").is_file()
        )
        if not inside:
            raise InputError(
                f"{path} holds no run: give a folder that `fedhb train` or `fedhb compare` has written"
            )
        order = {name: k for k, name in enumerate(_compared(path))}
        found += sorted(
            inside,
            key=lambda one: (order.get(one.name.rpartition("-seed")[0], len(order)), one.name),
        )
    return list(dict.fromkeys(path.resolve() for path in found))


def _compared(path: Path) -> list[str]:
    """The order of algorithms in a comparison."""
    try:
        return list(json.loads((path / "comparison.json").read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read(paths: Sequence[Path], tell: Callable[[Path], None] = lambda path: None) -> list[Method]:
    """The methods of these runs, in the order in which they first appear."""
    groups: list[list[RunData]] = []
    for path in find(paths):
        tell(path)
        run = read_run(path)
        try:
            run.differs_in_seed_alone(
                run
            )  # before it meets others: nonsense should be told of the run that has it
        except NONSENSE as error:
            raise senseless(path, error) from None
        fitting = [
            group for group in groups if all(run.differs_in_seed_alone(other) for other in group)
        ]
        beside = [
            group for group in fitting if group[0].path.parent == path.parent
        ]  # of one comparison, rather than of two
        if fitting:
            (beside or fitting)[0].append(run)
        else:
            groups.append([run])
    names = name_all([runs[0] for runs in groups])
    style = styles(names, [runs[0].algorithm for runs in groups])
    return [
        Method(name, sorted(runs, key=lambda run: run.seed), style[name])
        for name, runs in zip(names, groups, strict=True)
    ]


def name_all(runs: Sequence[RunData]) -> list[str]:
    """A name for each: its algorithm; where several have the same one, the settings by which they differ, or else the folder."""
    names = []
    for run in runs:
        others = [other for other in runs if other.algorithm == run.algorithm]
        keys = [
            key
            for key in run.compared
            if any(other.compared.get(key) != run.compared[key] for other in others)
        ]
        own = ", ".join(
            f"{key.removeprefix(run.algorithm + '.')}={run.compared[key]}" for key in keys
        )
        names.append(f"{run.algorithm} {own}".strip())
    return [
        name
        if names.count(name) == 1
        else f"{name} ({_place(run.path, [other.path for other in runs])})"
        for name, run in zip(names, runs, strict=True)
    ]


def _place(path: Path, every: Sequence[Path]) -> str:
    """A folder's name, with as many of those above it as tell it from the others."""
    ends = (path.parts[-count:] for count in range(1, len(path.parts)))
    return "/".join(
        next(
            (end for end in ends if sum(one.parts[-len(end) :] == end for one in every) == 1),
            path.parts,
        )
    )


def shared_settings(methods: Sequence[Method]) -> dict[str, Any]:
    """The settings of the federation that all runs have in common."""
    every = [run.compared for method in methods for run in method.runs]
    first = {
        key: value for key, value in every[0].items() if "." not in key and key not in OF_THE_METHOD
    }
    return {
        key: value for key, value in first.items() if all(one.get(key) == value for one in every)
    }
