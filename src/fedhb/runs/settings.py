"""The description of a run: everything that its result depends on, read once and handed on whole.

`Settings` holds a section for the data, the model, training, personalisation, privacy, the
evaluation, and the place where it runs. Files and flags have flat names, such as `personal_lr` for
`personalisation.lr`; a table holds the settings of an algorithm or of the model:

    dataset = "fashion-mnist"
    algorithm = "empirical-bayes"
    personal_lr = 0.01
    [empirical-bayes]
    kl_weight = 1e-4
    [model]
    name = "mlp"
    hidden = 128

A model without options of its own may be named at the top, `model = "mlp"`. This module does not
import torch, so that `fedhb --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.settings_fields import (
    GROUP_SPLITS,
    SCHEDULES,
    bounded,
    convert,
    did_you_mean,
    filters,
    setting,
)
from fedhb.training.plan import Plan

ALGORITHMS = (
    "empirical-bayes",
    "niw",
    "mixture",
    "fedavg",
    "fedprox",
    "fedbabu",
    "pfedbayes",
    "fedpa",
    "fedbe",
    "fedem",
    "fedpop",
    "ensemble",
    "centralised",
    "local",
)
PARTITIONS = ("shards", "dirichlet", "iid", "natural", "groups")
READ_BY = {
    "alpha": ("dirichlet",),
    "shards_per_client": ("shards", "groups"),
    "num_clients": ("shards", "dirichlet", "iid", "groups"),
    "group_split": ("groups",),
}
"""The settings that only some partitions read."""

MOST_WHOLE = 2**53
"""The largest whole number that every reader of JSON keeps."""

MOST_TOML = 2**20
"""The largest settings file that is read."""

TRAINING = ("lr", "momentum", "personal_lr", "personal_epochs")
"""The settings of a run that an algorithm may have its own defaults for, in its `training`."""


def _count(default: int, help: str, least: int = 1, flat: str = "") -> Any:
    return setting(default, help, least=least, most=MOST_WHOLE, flat=flat)


def _positive(default: float, help: str, flat: str = "") -> Any:
    return setting(default, help, positive=True, below=math.inf, flat=flat)


def _share(default: float, help: str) -> Any:
    return setting(default, help, least=0, below=1)


class Section:
    """A part of the description whose fields are checked when it is made."""

    def __post_init__(self) -> None:
        for about in dataclasses.fields(self):  # type: ignore[arg-type]
            if "bounds" not in about.metadata:
                continue
            name, value = about.metadata["flat"] or about.name, getattr(self, about.name)
            if type(about.default) in (int, float):
                value = _plain(name, value, whole=type(about.default) is int)
                object.__setattr__(self, about.name, value)
            bounded(name, value, about)


@dataclass(frozen=True)
class DataSettings(Section):
    """Which examples there are, and which clients hold them."""

    dataset: str = setting("digits", "a named data set")
    file: str = setting(
        "",
        "your own .npz file (x, y, and optionally client and split), instead of a data set",
        flat="data",
    )
    partition: str = setting(
        "",
        "shards, dirichlet, iid, natural or groups; default: as the data names clients or groups, "
        "else shards",
        choices=("", *PARTITIONS),
    )
    shards_per_client: int = _count(5, "class shards per client")
    alpha: float = _positive(0.5, "concentration of the Dirichlet partition")
    group_split: str = setting(
        "image",
        "groups: the same test images in every group (image), or each group's own (group)",
        choices=GROUP_SPLITS,
    )
    num_clients: int = _count(100, "number of clients (a natural partition has its own)")
    max_examples: int = _count(
        0, "the most training examples of a client, drawn at random; 0: all", least=0
    )
    holdout_clients: int = _count(
        0, "clients that never train and are personalised afterwards", least=0
    )
    validation: float = _share(
        0.0, "share of each client's training examples held back for validation"
    )
    server_share: float = _share(
        0.0,
        "share of the training examples whose inputs, without labels, go to the server (for fedbe)",
    )


@dataclass(frozen=True)
class ModelSettings(Section):
    """Which network is trained; its own options are in the table `model`."""

    name: str = setting(
        "",
        "mlp, convnet, mobilenet, or pkg.mod:factory for your own; default: the paper's for the "
        "data set",
        flat="model",
    )
    head: str = setting("", "the name of the model's head; default: its last linear layer")
    batch_norm: str = setting(
        "running",
        "batch norm by running statistics, or by those of the batch: running or batch",
        choices=("running", "batch"),
    )


@dataclass(frozen=True)
class TrainingSettings(Section):
    """How many rounds there are, and how a client trains in each."""

    rounds: int = _count(100, "number of rounds")
    fraction: float = setting(0.1, "share of the clients in a round", most=1, positive=True)
    local_epochs: int = _count(1, "epochs of a client's update")
    batch_size: int = _count(50, "examples per minibatch")
    lr: float = _positive(0.1, "learning rate, unless the algorithm has its own")
    momentum: float = _share(
        0.9, "momentum, from zero in every round, unless the algorithm has its own"
    )
    schedule: str = setting(
        "step",
        "learning rate over the rounds: step (x0.1 at 1/2 and 3/4), constant or cosine",
        choices=SCHEDULES,
    )


@dataclass(frozen=True)
class PersonalisationSettings(Section):
    """How a client adapts the global posterior to its own data."""

    lr: float = _positive(
        1e-3, "learning rate of personalisation, unless the algorithm has its own", "personal_lr"
    )
    epochs: int = _count(
        5, "epochs of personalisation, unless the algorithm has its own", flat="personal_epochs"
    )


@dataclass(frozen=True)
class Privacy(Section):
    """Differential privacy of a run (answers/privacy.py): `fit(..., privacy=Privacy(noise=1.0))`.

    Attributes:
        noise: standard deviation of the noise on the sums, in units of the longest contribution.
        clip: the length that a client's contribution is clipped to.
        delta: the delta at which epsilon is reported.
    """

    noise: float = setting(
        0.0,
        "differential privacy: noise on the sums, in units of the longest contribution; 0: none",
        flat="dp_noise",
        least=0,
        below=math.inf,
    )
    clip: float = _positive(1.0, "length that a client's contribution is clipped to", "dp_clip")
    delta: float = setting(
        1e-5, "delta at which epsilon is reported", flat="dp_delta", positive=True, below=1
    )


@dataclass(frozen=True)
class EvaluationSettings(Section):
    """The examples that the result's numbers are computed on."""

    split: str = setting(
        "test",
        "where the result's numbers come from: test or validation (then no test example is read)",
        flat="evaluate_on",
        choices=("test", "validation", "train", ""),
    )
    unseen: str = setting(
        "",
        "inputs that predictions should be unsure of, for the report: a class to leave out, a data "
        "set or a .npz file",
    )


@dataclass(frozen=True)
class PlaceSettings(Section):
    """Where a run is computed and how often it is kept."""

    device: str = setting("cpu", "cpu or cuda")
    workers: int = _count(0, "worker processes; 0: as many as pay off", least=0)
    checkpoint_every: int = _count(10, "rounds between checkpoints")


@dataclass(frozen=True)
class Settings(Section):
    """The description of a run. Defaults are the paper's settings for MNIST and Fashion-MNIST."""

    algorithm: str = setting(
        "empirical-bayes", "the algorithm, or pkg.mod:Class for one of your own"
    )
    seed: int = _count(0, "seed of everything random", least=0)
    defence: str = setting(
        "",
        "filters against hostile clients: default, or some of refuse,clip,winsorise,krum; none if "
        "empty",
    )
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    personalisation: PersonalisationSettings = field(default_factory=PersonalisationSettings)
    privacy: Privacy = field(default_factory=Privacy)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    place: PlaceSettings = field(default_factory=PlaceSettings)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of the algorithms' own settings, and of the model's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if filters(self.defence, ("default",)) and self.privacy.noise:
            raise InputError(
                f"defence={self.defence!r} looks at single answers, which dp_noise hides: "
                "choose one of them"
            )

    @classmethod
    def of(cls, options: Mapping[str, Mapping[str, Any]] | None = None, **values: Any) -> Settings:
        """Return the settings with these values by their flat names, and these tables."""
        settings = cls(options=dict(options or {})).change(**values)
        split = settings.evaluation.split
        for name, value, choices in (
            ("algorithm", settings.algorithm, ALGORITHMS),
            ("evaluate_on", split, ("test", "validation")),
        ):
            if value not in choices and not (name == "algorithm" and ":" in value):
                hint = did_you_mean(value, choices)
                raise InputError(f"{name}={value!r}{hint}: choose from {', '.join(choices)}")
        if split == "validation" and settings.data.validation == 0:
            raise InputError(
                "evaluate_on='validation' needs a validation split: give validation, such as 0.1"
            )
        for table, entries in settings.options.items():
            for key, value in entries.items():
                parts = value if isinstance(value, list) else [value]
                if not all(isinstance(part, (bool, int, float, str)) for part in parts):
                    raise InputError(
                        f"{table}.{key}={value}: give text, a number, true, false, or a list of "
                        "them"
                    )
        return settings

    def change(self, **values: Any) -> Settings:
        """Return these settings with other values, by their flat names."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, about = _known(name)
            sections.setdefault(section, {})[about.name] = value
        top = sections.pop("", {})
        changed = {
            section: dataclasses.replace(getattr(self, section), **entries)
            for section, entries in sections.items()
        }
        return dataclasses.replace(self, **changed, **top)

    def flat(self) -> dict[str, Any]:
        """Return every value by its flat name; the tables are in `options`."""
        return {
            name: getattr(getattr(self, section) if section else self, about.name)
            for name, (section, about) in flat_fields().items()
        }

    @property
    def title(self) -> str:
        """The name of the data: of the user's file, or of the data set."""
        return Path(self.data.file).stem if self.data.file else self.data.dataset

    def plan(self, train_head: bool) -> Plan:
        """Return how a client trains before the schedule changes its learning rate."""
        local = self.training
        return Plan(local.local_epochs, local.batch_size, local.lr, local.momentum, train_head)

    @property
    def personal_plan(self) -> Plan:
        """How a client personalises: body and head."""
        personal, local = self.personalisation, self.training
        return Plan(personal.epochs, local.batch_size, personal.lr, local.momentum, train_head=True)

    @classmethod
    def resolve(
        cls,
        source: str | Path | Mapping[str, Any] | None,
        flags: Mapping[str, Any],
        overrides: Sequence[str] = (),
        ignore: Sequence[str] = (),
        tuned: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Return the settings of a file and flags; the later of these sources counts more.

        Defaults; the algorithm's own `training`; what tuning chose for it; the file; flags;
        overrides. A flag that has no effect beside the others is refused. A file may have such
        values: that of a run holds every setting.

        Args:
            source: a file of settings, or its content.
            flags: values by their flat names; None where a flag is not given.
            overrides: texts `TABLE.KEY=VALUE`.
            ignore: keys of the file to pass over.
            tuned: what `read_chosen` returned.
        """
        values: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        content = source if isinstance(source, Mapping) else {}
        if isinstance(source, (str, Path)):
            content = read_toml(Path(source))
        algorithm = flags.get("algorithm") or content.get("algorithm", cls.algorithm)
        for key, value in content.items():
            if key in ignore:
                continue
            if isinstance(value, Mapping):
                options[_table(key, algorithm)] = dict(value)
            else:
                values[key] = value
        values |= {key: value for key, value in flags.items() if value is not None}
        for text in overrides:
            key, equals, value = text.partition("=")
            table, dot, name = key.strip().rpartition(".")
            if not (equals and dot and name):
                raise InputError(
                    f"--set {text!r}: write TABLE.KEY=VALUE, such as empirical-bayes.kl_weight=0.1"
                )
            options.setdefault(_table(table, algorithm), {})[name] = _value(value.strip())
        if "name" in options.get("model", {}):  # TOML has no key that is both a value and a table
            name = options["model"].pop("name")
            values["model"] = flags.get("model") or name
        chosen = (tuned or {}).get(algorithm, {})
        values = training_of(algorithm) | chosen.get("training", {}) | values
        if chosen.get("settings"):
            options[algorithm] = chosen["settings"] | options.get(algorithm, {})
        converted = {
            key: convert(key, value, _known(key)[1].default) for key, value in values.items()
        }
        settings = cls.of(options, **converted)
        _check_effect(settings, flags)
        return settings

    def to_toml(self, versions: Mapping[str, str]) -> str:
        """Return the text of a file that `resolve` reads back."""
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines = [f"# Resolved settings of this run. Versions: {named}"]
        lines += [
            f"{name} = {toml_value(value)}"
            for name, value in self.flat().items()
            if name not in self.options
        ]
        for table, entries in self.options.items():
            content = {"name": self.model.name} if table == "model" else {}
            lines += ["", *toml_table(table, content | dict(entries))]
        return "\n".join(lines) + "\n"


@cache
def flat_fields() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Return the section ("" for the settings themselves) and the field of every flat name."""
    fields = {}
    for about in dataclasses.fields(Settings):
        if "flat" in about.metadata:
            fields[about.name] = ("", about)
        elif about.name != "options":
            for part in dataclasses.fields(about.default_factory):  # type: ignore[arg-type]
                fields[part.metadata["flat"] or part.name] = (about.name, part)
    return fields


def _known(name: str) -> tuple[str, dataclasses.Field[Any]]:
    fields = flat_fields()
    if name not in fields:
        hint = did_you_mean(name, fields)
        raise InputError(f"unknown setting {name!r}{hint}: the settings are {', '.join(fields)}")
    return fields[name]


def _plain(name: str, value: Any, whole: bool) -> int | float:
    """Return a number as one of Python's own, as files hold no other; refuse what is no number."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise InputError(f"{name}={value!r}: give a {'whole ' if whole else ''}number")
    return int(value) if isinstance(value, Integral) else float(value)


def check_tables(
    settings: Settings, overrides: Sequence[str], compared: Sequence[str] = ()
) -> None:
    """Refuse `table.key=value` for an algorithm that does not run: it would have no effect.

    Args:
        settings: of the run.
        overrides: texts `TABLE.KEY=VALUE`.
        compared: the algorithms, where several run.
    """
    for text in overrides:
        table = text.partition("=")[0].strip().rpartition(".")[0]
        if table not in (*(compared or [settings.algorithm]), "model"):
            used = f"algorithms are {', '.join(compared)}"
            used = used if compared else f"algorithm is {settings.algorithm}"
            remedy = f"name {table} in --algorithms" if compared else f"give --algorithm {table}"
            raise InputError(f"--set {text!r}, but the {used}: leave it out, or {remedy}")


def check_partition(kind: str, flags: Mapping[str, Any]) -> None:
    """Refuse a flag (None: not given) that this kind of partition does not read.

    Where `kind` is empty, the data will decide.
    """
    possible = {kind} if kind else {"natural", "groups", "shards"}
    reasons = {"": "no partition is given", "natural": "the data name their clients"}
    for name, kinds in READ_BY.items():
        if flags.get(name) is not None and possible.isdisjoint(kinds):
            reason = reasons.get(kind, f"the partition is {kind}")
            raise InputError(
                f"{name}={flags[name]!r} has no effect: {reason}; leave it out, or give "
                f"--partition {' or '.join(kinds)}"
            )


def _check_effect(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Refuse flags without effect: who gives one expects an effect."""
    check_partition(settings.data.partition, flags)
    for name in ("dp_clip", "dp_delta"):
        if flags.get(name) is not None and not settings.privacy.noise:
            raise InputError(
                f"{name}={flags[name]} has no effect without noise: leave it out, or give "
                "--dp-noise, such as 1.0"
            )
    if flags.get("dataset") is not None and settings.data.file:
        raise InputError(
            f"dataset={flags['dataset']!r} has no effect beside data={settings.data.file!r}: leave "
            "one of them out (--data '' does where a settings file has it)"
        )


def training_of(algorithm: Any) -> dict[str, Any]:
    """Return the defaults for TRAINING that an algorithm, or the one of this name, declares."""
    if isinstance(algorithm, str):
        # here, because it imports torch
        from fedhb.algorithms import ALGORITHMS as CLASSES
        from fedhb.algorithms import class_of

        algorithm = class_of(algorithm) if ":" in algorithm else CLASSES.get(algorithm)
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    # not what it inherits: the values that suit FedAvg were not chosen for its descendants
    values = dict(vars(kind).get("training", {}))
    for key in values:
        if key not in TRAINING:
            raise InputError(
                f"{algorithm.name}.training has {key!r}: it may have {', '.join(TRAINING)}"
            )
    return values


def training_values(algorithm: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return each setting of TRAINING: the given value, else the algorithm's, else the default."""
    defaults = {name: flat_fields()[name][1].default for name in TRAINING}
    present = {key: value for key, value in given.items() if value is not None}
    return defaults | training_of(algorithm) | present


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a settings file."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_TOML + 1)
        if len(content) > MOST_TOML:
            raise InputError(f"{path} has more than {MOST_TOML} bytes: a settings file is shorter")
        return tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))
    except OSError as error:
        raise InputError(f"cannot read the settings file {path}: {error.strerror}") from None
    except RecursionError:
        raise InputError(f"{path} is not a TOML file of settings: it is nested too deep") from None
    except InputError:
        raise
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise InputError(f"{path} is not a TOML file: {error}") from None


def _table(name: str, algorithm: Any) -> str:
    known = (*ALGORITHMS, "model", *([algorithm] if ":" in str(algorithm) else []))
    if name not in known:
        hint = did_you_mean(name, known)
        raise InputError(f"unknown table {name!r}{hint}: choose from {', '.join(known)}")
    return name


def _value(text: str) -> Any:
    """Return a value from the command line: TOML where it is that, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def toml_key(key: str) -> str:
    """Return a key as TOML writes it."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_table(name: str, entries: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in entries.items()]
    return [f"[{toml_key(name)}]", *lines]


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, int | float) else toml_value(str(value))


def read_chosen(path: Path) -> dict[str, Any]:
    """Return what `fedhb tune` wrote: tables `training` and `settings` for each algorithm."""
    content = read_toml(path)
    for name, table in content.items():
        parts = []
        if isinstance(table, Mapping):
            parts = [table.get(part) for part in ("training", "settings")]
        sound = len(parts) == 2 and all(isinstance(part, Mapping) for part in parts)
        if name not in ALGORITHMS or not sound or not set(parts[0] or ()) <= set(TRAINING):
            raise InputError(
                f"{path}: {name} is not what `fedhb tune` writes for an algorithm: give its "
                "chosen.toml"
            )
    return content


def untaken(chosen: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return the names of the values in which a run differs from what was chosen for it."""
    values, options = settings.flat(), settings.options.get(settings.algorithm, {})
    training = [name for name, v in chosen.get("training", {}).items() if values[name] != v]
    return training + [
        f"{settings.algorithm}.{name}"
        for name, value in chosen.get("settings", {}).items()
        if options.get(name) != value
    ]
