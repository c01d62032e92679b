"""The settings of a training run: a TOML file, flags that override it, and the resolved file that every run keeps.

A settings file has the names below at its top, and a table for the settings of an algorithm or of the model:

    dataset = "fashion-mnist"
    algorithm = "niw"
    [niw]
    kl_weight = 1e-4
    [model]
    name = "mlp"
    hidden = 128

A model without options of its own may be named at the top, `model = "mlp"`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.settings_fields import convert, did_you_mean, filters

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
SCHEDULES = ("step", "constant", "cosine")
PARTITIONS = ("shards", "dirichlet", "iid", "natural", "groups")
SPLITS = ("image", "group")
READ_BY = {
    "alpha": ("dirichlet",),
    "shards_per_client": ("shards", "groups"),
    "num_clients": ("shards", "dirichlet", "iid", "groups"),
    "group_split": ("groups",),
}
"""The settings that only some partitions read."""


MOST = 2**53
"""The largest whole number that every reader of JSON keeps."""


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """Everything a training run depends on. The defaults are the paper's settings for MNIST and Fashion-MNIST."""

    dataset: str = _setting("digits", "a named data set")
    data: str = _setting("", "your own .npz file (x, y, and optionally client and split), instead of a data set")
    algorithm: str = _setting("empirical-bayes", "the algorithm")
    partition: str = _setting(
        "", "shards, dirichlet, iid, natural or groups; default: as the data names clients or groups, else shards"
    )
    shards_per_client: int = _setting(5, "s: class shards per client")
    alpha: float = _setting(0.5, "concentration of the Dirichlet partition")
    group_split: str = _setting("image", "groups: test images are the same in every group (image), or each group's own (group)")
    num_clients: int = _setting(100, "N: number of clients (a natural partition has its own)")
    max_examples: int = _setting(0, "at most so many training examples per client, drawn at random; 0: all")
    holdout_clients: int = _setting(0, "clients that never train and are personalised afterwards")
    validation: float = _setting(0.0, "share of each client's training examples held back for validation")
    evaluate_on: str = _setting("test", "where the result's numbers come from: test or validation (then no test example is read)")
    unseen: str = _setting(
        "", "what predictions should be unsure of: a class to leave out, a data set or a .npz file, for the report"
    )
    server_share: float = _setting(0.0, "share of the training examples whose inputs, unlabelled, go to the server (for fedbe)")
    fraction: float = _setting(0.1, "f: share of the clients in a round")
    local_epochs: int = _setting(1, "tau: epochs of a client's update")
    rounds: int = _setting(100, "R: number of rounds")
    batch_size: int = _setting(50, "examples per minibatch")
    lr: float = _setting(0.1, "learning rate, unless the algorithm has its own")
    momentum: float = _setting(0.9, "momentum, from zero in every round, unless the algorithm has its own")
    schedule: str = _setting("step", "learning rate over the rounds: step (x0.1 at 1/2 and 3/4), constant or cosine")
    personal_lr: float = _setting(1e-3, "learning rate of personalisation, unless the algorithm has its own")
    personal_epochs: int = _setting(5, "epochs of personalisation, unless the algorithm has its own")
    model: str = _setting("", "mlp, convnet, mobilenet, or pkg.mod:factory for your own; default: the paper's for the data set")
    head: str = _setting("", "the name of the model's head; default: its last linear layer")
    batch_norm: str = _setting("running", "batch norm by running statistics, or by those of the batch: running or batch")
    seed: int = _setting(0, "seed of everything random")
    device: str = _setting("cpu", "cpu or cuda")
    workers: int = _setting(0, "worker processes; 0: as many as pay off")
    checkpoint_every: int = _setting(10, "rounds between checkpoints")
    dp_noise: float = _setting(0.0, "differential privacy: noise on the sums, in units of the longest contribution; 0: none")
    dp_clip: float = _setting(1.0, "C: length that a client's contribution is clipped to")
    dp_delta: float = _setting(1e-5, "delta at which epsilon is reported")
    defence: str = _setting("", "filters against hostile clients: default, or some of refuse,clip,winsorise,krum; none if empty")
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of the algorithms' own settings, and of the model's."""

    def __post_init__(self) -> None:
        positive = (
            "num_clients",
            "rounds",
            "local_epochs",
            "batch_size",
            "personal_epochs",
            "checkpoint_every",
            "shards_per_client",
        )
        for f in dataclasses.fields(self):
            if type(f.default) in (int, float):
                object.__setattr__(self, f.name, _number(f.name, getattr(self, f.name), whole=type(f.default) is int))
        for name in (f.name for f in dataclasses.fields(self) if type(f.default) is int):
            if getattr(self, name) > MOST:
                raise InputError(f"{name}={getattr(self, name)}: give at most {MOST}")
        for name in positive:
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: give at least 1")
        for name in ("lr", "personal_lr", "alpha", "dp_clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name}={getattr(self, name)}: give a positive number")
        for name in ("holdout_clients", "max_examples", "workers", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: give 0 or more")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum={self.momentum}: give a number from 0 up to, but not including, 1")
        if not 0 <= self.dp_noise < float("inf"):
            raise InputError(f"dp_noise={self.dp_noise}: give 0 for no privacy, or a positive number such as 1.0")
        if not 0 < self.dp_delta < 1:
            raise InputError(f"dp_delta={self.dp_delta}: give a small positive number, well below 1 / number of clients")
        if not 0 <= self.server_share < 1:
            raise InputError(f"server_share={self.server_share}: give a share from 0 up to, but not including, 1")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation={self.validation}: give a share from 0 up to, but not including, 1")
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction={self.fraction}: give the share of clients in a round, above 0 and at most 1")
        if self.evaluate_on == "validation" and self.validation == 0:
            raise InputError("evaluate_on='validation' needs a validation split: give validation, such as 0.1")
        if filters(self.defence, ("default",)) and self.dp_noise:
            raise InputError(
                f"defence={self.defence!r} looks at single answers, which dp_noise hides: choose one"
            )
        choices = {
            "algorithm": ALGORITHMS,
            "partition": ("", *PARTITIONS),
            "group_split": SPLITS,
            "schedule": SCHEDULES,
            "batch_norm": ("running", "batch"),
            "evaluate_on": ("test", "validation"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(
                    f"{name}={value!r}{did_you_mean(value, allowed)}: choose from {', '.join(a for a in allowed if a)}"
                )
        for table, entries in self.options.items():
            for key, value in entries.items():
                if not all(isinstance(v, (bool, int, float, str)) for v in (value if isinstance(value, list) else [value])):
                    raise InputError(f"{table}.{key}={value}: give text, a number, true, false, or a list of them")

    @classmethod
    def resolve(
        cls,
        source: str | Path | Mapping[str, Any] | None,
        flags: Mapping[str, Any],
        overrides: Sequence[str] = (),
        ignore: Sequence[str] = (),
        tuned: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Defaults, then the algorithm's `training`, what tuning chose for it (`read_chosen`), the file or its content (less the
        keys to ignore), flags (None: not given), and `table.key=value` overrides.

        A flag that changes nothing beside the others is refused. In a file it is not: that of a run holds every setting.
        """
        values: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        content = source if isinstance(source, Mapping) else read_toml(Path(source)) if source is not None else {}
        for key, value in content.items():
            if key in ignore:
                continue
            if isinstance(value, Mapping):
                options[_table(key)] = dict(value)
            else:
                values[key] = value
        values |= {key: value for key, value in flags.items() if value is not None}
        for text in overrides:
            key, equals, value = text.partition("=")
            table, dot, name = key.strip().partition(".")
            if not (equals and dot and name):
                raise InputError(f"--set {text!r}: write TABLE.KEY=VALUE, such as niw.kl_weight=0.001")
            options.setdefault(_table(table), {})[name] = _value(value.strip())
        if "name" in options.get("model", {}):  # TOML has no key that is both a value and a table
            name = options["model"].pop("name")
            values["model"] = flags.get("model") or name
        algorithm = values.get("algorithm", cls.algorithm)
        own = (tuned or {}).get(algorithm, {})
        values = training_of(algorithm) | own.get("training", {}) | values
        if own.get("settings"):
            options[algorithm] = own["settings"] | options.get(algorithm, {})
        settings = cls(**{key: _check(key, value) for key, value in values.items()}, options=options)
        _check_effect(settings, flags)
        return settings

    def to_toml(self, versions: Mapping[str, str]) -> str:
        """The resolved settings as a file that `resolve` reads back."""
        lines = ["# Resolved settings of this run. Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items())]
        tables: dict[str, Mapping[str, Any]] = {"options": {}} | dict(self.options)
        lines += [f"{f.name} = {toml_value(getattr(self, f.name))}" for f in dataclasses.fields(self) if f.name not in tables]
        for table, entries in self.options.items():
            named = {"name": self.model} if table == "model" else {}
            lines += [
                "",
                f"[{table}]",
                *(f"{toml_key(key)} = {toml_value(value)}" for key, value in {**named, **entries}.items()),
            ]
        return "\n".join(lines) + "\n"


def _number(name: str, value: Any, whole: bool) -> int | float:
    """A number as Python's own: files hold no other, and numpy has some that are neither int nor float."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise InputError(f"{name}={value!r}: give a {'whole ' if whole else ''}number")
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def own_tables(settings: Settings, overrides: Sequence[str], compared: Sequence[str] = ()) -> None:
    """Refuse `table.key=value` for an algorithm that is not the run's, or none of those compared: it would change nothing."""
    for text in overrides:
        table = text.partition(".")[0].strip()
        if table not in (*(compared or [settings.algorithm]), "model"):
            what = f"algorithms are {', '.join(compared)}" if compared else f"algorithm is {settings.algorithm}"
            remedy = f"name {table} in --algorithms" if compared else f"give --algorithm {table}"
            raise InputError(f"--set {text!r}, but the {what}: leave it out, or {remedy}")


def check_partition(kind: str, flags: Mapping[str, Any]) -> None:
    """Refuse a flag (None: not given) that this kind of partition does not read; an empty kind is one that the data will say."""
    possible = {kind} if kind else {"natural", "groups", "shards"}
    for name, kinds in READ_BY.items():
        if flags.get(name) is not None and possible.isdisjoint(kinds):
            why = {"": "no partition is given", "natural": "the data name their clients"}.get(kind, f"the partition is {kind}")
            raise InputError(
                f"{name}={flags[name]!r} has no effect: {why}; leave it out, or give --partition {' or '.join(kinds)}"
            )


def _check_effect(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Refuse flags that would change nothing: whoever gives one believes that it does."""
    check_partition(settings.partition, flags)
    for name in ("dp_clip", "dp_delta"):
        if flags.get(name) is not None and not settings.dp_noise:
            raise InputError(f"{name}={flags[name]} has no effect without noise: leave it out, or give --dp-noise, such as 1.0")
    if flags.get("dataset") is not None and settings.data:
        raise InputError(
            f"dataset={flags['dataset']!r} has no effect beside data={settings.data!r}: leave one of them out (--data '' does "
            "where a settings file has it)"
        )


MOST_TOML = 2**20
"""The largest settings file that is read."""

TRAINING = ("lr", "momentum", "personal_lr", "personal_epochs")
"""The settings of a run that an algorithm may have values of its own for, in its `training`."""


def training_of(algorithm: Any) -> dict[str, Any]:
    """An algorithm's own values, given it or its name: what is taken where neither file, flag nor argument gives one."""
    if isinstance(algorithm, str):
        from fedhb.algorithms import ALGORITHMS as CLASSES  # here: `fedhb --help` does not wait for torch

        algorithm = CLASSES.get(algorithm)
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    own = dict(vars(kind).get("training", {}))  # its own alone: what was chosen for FedAvg was not chosen for its descendants
    for key in own:
        if key not in TRAINING:
            raise InputError(f"{algorithm.name}.training has {key!r}: it may have {', '.join(TRAINING)}")
    return own


def training_values(algorithm: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of TRAINING: as given (None: not given), else the algorithm's own, else the default."""
    defaults = {key: value for key, value in _fields().items() if key in TRAINING}
    return defaults | training_of(algorithm) | {key: value for key, value in given.items() if value is not None}


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file."""
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


def _fields() -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(Settings) if f.name != "options"}


def _check(key: str, value: Any) -> Any:
    fields = _fields()
    if key not in fields:
        raise InputError(f"unknown setting {key!r}{did_you_mean(key, fields)}: the settings are {', '.join(fields)}")
    return convert(key, value, fields[key])


def _table(name: str) -> str:
    known = (*ALGORITHMS, "model")
    if name not in known:
        raise InputError(f"unknown table {name!r}{did_you_mean(name, known)}: choose from {', '.join(known)}")
    return name


def _value(text: str) -> Any:
    """A value from the command line: a TOML value where it is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def toml_key(key: str) -> str:
    """A key as TOML writes it."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def read_chosen(path: Path) -> dict[str, Any]:
    """What `fedhb tune` wrote: for each algorithm tables `training` and `settings`."""
    content = read_toml(path)
    for name, table in content.items():
        parts = [table.get(part) for part in ("training", "settings")] if isinstance(table, Mapping) else []
        sound = len(parts) == 2 and all(isinstance(part, Mapping) for part in parts) and set(parts[0] or ()) <= set(TRAINING)
        if name not in ALGORITHMS or not sound:
            raise InputError(f"{path}: {name} is not what `fedhb tune` writes for an algorithm: give its chosen.toml")
    return content


def untaken(chosen: Mapping[str, Any], settings: Settings) -> list[str]:
    """What a run has otherwise than it was chosen for its algorithm."""
    own = settings.options.get(settings.algorithm, {})
    training = [name for name, value in chosen.get("training", {}).items() if getattr(settings, name) != value]
    return training + [
        f"{settings.algorithm}.{name}" for name, value in chosen.get("settings", {}).items() if own.get(name) != value
    ]


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, int | float) else toml_value(str(value))
