"""The data of run folders; runs that differ only in their seed are one method."""

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
"""Settings by which two runs of one method may differ.

`data` is among them because the path of the data does not matter: `RunData.trained_on` has their
content.
"""
OF_THE_METHOD = ("algorithm", "lr", "momentum", "personal_lr", "personal_epochs")
"""Settings that belong to the method, not to the federation."""
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
"""The exceptions that the content of a file causes if fedhb did not write it."""
NODES = "nodes"
"""The name of the data set in the result of a federation whose nodes hold their own data."""


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder.

    Attributes:
        path: the folder.
        settings: settings.toml.
        versions: the versions of the packages that made the run.
        rounds: the records of the rounds.
        result: result.json; None if the run is not finished.
        evaluation: evaluation.json; None if there is none.
        problem: problem.json, which describes the network and the federation; empty if there is
            none.
    """

    path: Path
    settings: dict[str, Any]
    versions: str
    rounds: list[dict[str, Any]]
    result: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    problem: dict[str, Any] = field(default_factory=dict)

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
        """The name of the training data: the name of the user's file, or else the data set's."""
        file = self.settings.get("data")
        return Path(str(file)).stem if file else str(self.settings.get("dataset") or "data")

    @property
    def likelihood(self) -> str:
        """The likelihood: "categorical", "gaussian", or "" if it is another or not known."""
        if "likelihood" in self.problem:
            kind = str(self.problem["likelihood"]["kind"])
            return kind if kind in ("categorical", "gaussian") else ""
        metrics = (self.result or {}).get("global") or {}
        return "categorical" if "accuracy" in metrics else "gaussian" if "rmse" in metrics else ""

    @property
    def per_client(self) -> dict[str, Any]:
        """The result's metrics of each client; empty if there are none."""
        return (self.result or {}).get("per_client") or {}

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The settings that make a method; the algorithm's own settings as ALGORITHM.NAME."""
        settings: dict[str, Any] = {}
        for key, value in self.settings.items():
            if isinstance(value, dict):
                if key in (self.algorithm, "model"):
                    settings |= {f"{key}.{name}": option for name, option in value.items()}
            elif key not in NOT_COMPARED:
                settings[key] = self.dataset if key == "dataset" else value
        if self.settings.get("data") and self.named_by_data:
            # The setting `num_clients` was not used: the data have the number of clients.
            novel = self.settings.get("holdout_clients", 0)
            total = self.num_clients + novel if self.num_clients else "as in the data"
            settings["num_clients"] = total
        return settings

    @property
    def named_by_data(self) -> bool:
        """Whether the data may name the clients: the user's file does, or the nodes of Flower."""
        on_nodes = (self.result or {}).get("dataset") == NODES
        partition = self.settings.get("partition", "")
        return bool(self.settings.get("data") or on_nodes) and partition in ("", "natural")

    @property
    def num_clients(self) -> int:
        """The number of clients that train; 0 if no file of the folder has it."""
        if "federation" in self.problem:
            return int(self.problem["federation"]["num_clients"])
        if self.evaluation:
            return len(self.evaluation["clients"]["client"])
        return 0 if self.named_by_data else int(self.settings.get("num_clients", 0))

    @cached_property
    def trained_on(self) -> dict[str, Any]:
        """The data, the network and the likelihood, as far as the folder describes them.

        Only what does not depend on the seed is here. Settings have at most the names of these.
        """
        result, problem = self.result or {}, self.problem
        description: dict[str, Any] = {
            key: problem[key]
            for key in ("model", "head", "batch_norm", "input_shape")
            if key in problem
        }
        if "likelihood" in problem:
            # The scale of the targets depends on the clients that are held out, so on the seed.
            kind, settings = problem["likelihood"]["kind"], problem["likelihood"]["settings"]
            of_seed = ("centre", "scale", "noise")
            fixed = {key: value for key, value in settings.items() if key not in of_seed}
            description["likelihood"] = (kind, fixed)
        if result.get("data"):
            description["data"] = sorted(result["data"].values())
        elif result:  # arrays, which have no hash
            description["data"] = problem.get("federation")
        if result:
            description["split"] = result.get("split")
            description["title"] = result.get("dataset")
        if self.evaluation:
            description["network"] = self.evaluation["network"]
        if self.rounds and "model" in problem and problem["model"] is None:
            # The user's own module, of which only the class is known: compare its size.
            description["sent"] = self.rounds[0].get("down_bytes")
        return description

    def differs_in_seed_alone(self, other: RunData) -> bool:
        """Return whether both are runs of one method with different seeds.

        Only what is known of both runs is compared.
        """
        description, other_description = self.trained_on, other.trained_on
        shared = description.keys() & other_description.keys()
        same = all(description[key] == other_description[key] for key in shared)
        return same and self.compared == other.compared and self.seed != other.seed


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[RunData]
    style: Style = field(default_factory=lambda: Style("#0072b2"))

    @property
    def first(self) -> RunData:
        """The run whose details are shown: the first with an evaluation, else the first."""
        return next((run for run in self.runs if run.evaluation), self.runs[0])

    @property
    def finished(self) -> list[RunData]:
        """The runs with a result."""
        return [run for run in self.runs if run.result is not None]


def read_run(path: Path) -> RunData:
    """Read a run from its folder."""
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
            f"{path / 'settings.toml'} has seed={settings['seed']!r}, which is no whole number: "
            "restore the file"
        )
    versions = text.partition("\n")[0].partition("Versions: ")[2]
    result = folder.result() if (path / "result.json").exists() else None
    evaluation = folder.read_json(EVALUATION) if (path / EVALUATION).exists() else None
    problem = folder.read_json(PROBLEM) if (path / PROBLEM).exists() else {}
    return RunData(path, settings, versions, folder.rounds(), result, evaluation, problem)


def unreadable(path: Path, error: BaseException) -> InputError:
    """Make the error for a run whose files can be read, but do not hold what fedhb writes."""
    cause = f"{type(error).__name__}: {reason(error)}"
    return InputError(
        f"{path}: its files do not hold what fedhb writes ({cause}): restore them, or leave this "
        "run out"
    )


def find(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs among these folders, and those inside folders of comparisons."""
    folders: list[Path] = []
    for path in paths:
        if (path / "settings.toml").is_file() and (path / "rounds.jsonl").exists():
            folders.append(path)
            continue
        inside = [
            file.parent
            for file in path.glob("*/rounds.jsonl")
            if (file.parent / "settings.toml").is_file()
        ]
        if not inside:
            raise InputError(
                f"{path} holds no run: give a folder that `fedhb train` or `fedhb compare` has "
                "written"
            )
        order = {name: k for k, name in enumerate(_algorithms(path))}
        folders += sorted(
            inside,
            key=lambda run: (order.get(run.name.rpartition("-seed")[0], len(order)), run.name),
        )
    return list(dict.fromkeys(path.resolve() for path in folders))


def _algorithms(path: Path) -> list[str]:
    """Return the algorithms of a comparison in their order; nothing if the folder has none."""
    try:
        return list(json.loads((path / "comparison.json").read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read(paths: Sequence[Path], tell: Callable[[Path], None] = lambda path: None) -> list[Method]:
    """Read the methods of these runs, in the order in which they first appear.

    Args:
        paths: folders of runs or of comparisons.
        tell: reports each folder that is read.
    """
    groups: list[list[RunData]] = []
    for path in find(paths):
        tell(path)
        run = read_run(path)
        try:
            # Compare the run with itself first, so that an error names the run that causes it.
            run.differs_in_seed_alone(run)
        except UNREADABLE as error:
            raise unreadable(path, error) from None
        matching = [
            group for group in groups if all(run.differs_in_seed_alone(other) for other in group)
        ]
        # Runs of the same comparison come first.
        same_folder = [group for group in matching if group[0].path.parent == path.parent]
        if matching:
            (same_folder or matching)[0].append(run)
        else:
            groups.append([run])
    names = name_all([runs[0] for runs in groups])
    style = styles(names, [runs[0].algorithm for runs in groups])
    return [
        Method(name, sorted(runs, key=lambda run: run.seed), style[name])
        for name, runs in zip(names, groups, strict=True)
    ]


def name_all(runs: Sequence[RunData]) -> list[str]:
    """Return a name for each run.

    The name is the algorithm. If several runs have the same algorithm, the settings by which they
    differ follow, and if these are equal too, the folder.
    """
    names = []
    for run in runs:
        others = [other for other in runs if other.algorithm == run.algorithm]
        differences = ", ".join(
            f"{key.removeprefix(run.algorithm + '.')}={value}"
            for key, value in run.compared.items()
            if any(other.compared.get(key) != value for other in others)
        )
        names.append(f"{run.algorithm} {differences}".strip())
    paths = [run.path for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({_short_path(run.path, paths)})"
        for name, run in zip(names, runs, strict=True)
    ]


def _short_path(path: Path, paths: Sequence[Path]) -> str:
    """Return the shortest end of a path that no other of these paths has."""
    ends = (path.parts[-count:] for count in range(1, len(path.parts)))
    unique = (end for end in ends if sum(other.parts[-len(end) :] == end for other in paths) == 1)
    return "/".join(next(unique, path.parts))


def shared_settings(methods: Sequence[Method]) -> dict[str, Any]:
    """Return the settings of the federation that are the same in all runs."""
    settings = [run.compared for method in methods for run in method.runs]
    return {
        key: value
        for key, value in settings[0].items()
        if "." not in key
        and key not in OF_THE_METHOD
        and all(other.get(key) == value for other in settings)
    }
