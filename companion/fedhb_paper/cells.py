"""What most kinds share: cells and variants, and the settings of a run that they give.

    seeds = [0, 1, 2]
    [common]                                        # settings of every run
    num_clients = 100
    [cells."mnist, tau=5"]                          # what a cell changes
    dataset = "mnist"
    local_epochs = 5
    seeds = [0]                                     # its own, instead of those above
    only = ["niw"]                                  # these variants alone
    [variants]                                      # what is compared: an algorithm, and what it changes
    niw = {}
    "niw S=10" = {algorithm = "niw", niw = {num_samples = 10}}

A variant overrides its cell, a cell the common settings; tables of algorithms are merged name by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedhb import data
from fedhb.algorithms import ALGORITHMS, build
from fedhb.clients.clients import Clients
from fedhb.data.dataset import Dataset
from fedhb.engine.loop import Callback, State
from fedhb.errors import InputError
from fedhb.files import file_hash
from fedhb.network import nets
from fedhb.runs.from_settings import make_clients
from fedhb.runs.run import Run
from fedhb.runs.settings import Settings
from fedhb.settings_fields import did_you_mean
from fedhb_paper.records import MISSING, Key

Tell = Callable[[float, str], None]
"""Told the share that is done, and what is done now."""

SOURCES = {"data": "dataset", "dataset": "data"}
"""Where examples come from, and what that takes the place of."""

CHOOSING = ("seeds", "only")
"""What a cell may have besides settings of its runs."""

WHERE = ("workers", "device", "checkpoint_every", "options", "data")
"""Fields of Settings that no result depends on, or that are resolved below."""

BEFORE = {"niw.relax": False, "niw.along": False, "niw.same_steps": False}
"""What there was before a setting whose default is not that."""


def work(settings: Mapping[str, Any]) -> list[Key]:
    """A key for every seed, cell and variant; all of a seed before the next one."""
    for name in ("seeds", "cells", "variants"):
        if not settings.get(name):
            raise InputError(f"settings.toml has no {name}: give some")
    for name, cell in settings["cells"].items():
        for variant in cell.get("only", ()):
            if variant not in settings["variants"]:
                raise InputError(
                    f"cell {name!r}: only has {variant!r}{did_you_mean(variant, settings['variants'])}: no such variant"
                )
    own = [seed for cell in settings["cells"].values() for seed in cell.get("seeds", ())]
    return [
        {"cell": name, "variant": variant, "seed": seed}
        for seed in dict.fromkeys([*settings["seeds"], *own])
        for name, cell in settings["cells"].items()
        if seed in cell.get("seeds", settings["seeds"])
        for variant in cell.get("only", settings["variants"])
    ]


def settings_of(settings: Mapping[str, Any], key: Key) -> Settings:
    """The settings of one run, in one process."""
    merged: dict[str, Any] = {}
    for layer in (
        settings.get("common", {}),
        settings["cells"][key["cell"]],
        settings["variants"][key["variant"]],
    ):
        if set(SOURCES) <= set(layer):
            raise InputError(
                f"cell {key['cell']!r} has both data={layer['data']!r} and dataset={layer['dataset']!r}: give one"
            )
        for name, value in layer.items():
            if name in CHOOSING:
                continue
            if name in SOURCES:
                merged.pop(
                    SOURCES[name], None
                )  # a file takes the place of a data set, and the other way round
            if isinstance(value, Mapping):
                before = merged.get(name, {})
                value = {**({"name": before} if isinstance(before, str) else before), **value}
            merged[name] = value
    algorithm = merged.pop("algorithm", key["variant"])
    merged = {
        name: value for name, value in merged.items() if name not in ALGORITHMS or name == algorithm
    }
    try:
        return Settings.resolve(merged, {"algorithm": algorithm, "seed": key["seed"], "workers": 1})
    except InputError as error:
        raise InputError(f"cell {key['cell']!r}, variant {key['variant']!r}: {error}") from None


def resolved(settings: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Every setting that the result depends on, those of the algorithm and of the model as TABLE.NAME."""
    chosen = settings_of(settings, key)
    own = {"dataset": Path(chosen.data).name, "data": file_hash(chosen.data)} if chosen.data else {}
    return flat(chosen) | own | ({"clean": settings["clean"]} if "clean" in settings else {})


def flat(chosen: Settings) -> dict[str, Any]:
    """The same for a run's settings."""
    found = {
        f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen) if f.name not in WHERE
    }
    found["model"] = chosen.model or nets.DEFAULT.get(
        Path(chosen.data).stem if chosen.data else chosen.dataset, "mlp"
    )
    algorithm: Any = build(chosen.algorithm, chosen.options.get(chosen.algorithm, {}))
    found |= {
        f"{chosen.algorithm}.{name}": value for name, value in dataclasses.asdict(algorithm).items()
    }
    return found | {
        f"model.{name}": value for name, value in chosen.options.get("model", {}).items()
    }


def effective(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Settings as they act: names that they lack at what there was before them, and what does nothing beside the others off."""
    found = {name: value for name in names if (value := before(name)) is not MISSING} | dict(
        settings
    )
    layered = found.get("niw.dof") == "per_layer"
    for name, acts in (
        ("niw.relax", layered),
        ("niw.same_steps", layered),
        ("niw.along", layered and found.get("niw.relax")),
    ):
        if name in found:
            found[name] = bool(acts and found[name])
    return found


def before(name: str) -> Any:
    """What there was before a setting, by its name in `resolved`: mostly its default."""
    table, dot, field = name.partition(".")
    owner = ALGORITHMS.get(table) if dot else Settings
    default = (
        next((f.default for f in dataclasses.fields(owner) if f.name == (field or name)), MISSING)
        if owner
        else MISSING
    )
    return BEFORE.get(name, default)


def dataset_of(name: str, path: str = "") -> Dataset:
    """A data set, or the one in the user's file, kept for the next run unless the file has changed."""
    return _dataset_of(name, path, file_hash(path) if path else "")


@lru_cache(maxsize=1)
def _dataset_of(name: str, path: str, _: str) -> Dataset:
    return data.read_npz(path) if path else data.load(name)


def clients_of(run: Run, settings: Settings) -> tuple[Clients, Clients | None]:
    """The clients of a run and the novel ones, on the device that its network is on."""
    clients, novel = make_clients(settings, dataset_of(settings.dataset, settings.data))
    device = str(run.problem.network.device)
    return clients.to(device), novel.to(device) if novel is not None else None


class Told(Callback):
    """The callback that tells of every round."""

    def __init__(self, tell: Tell, until: float = 1.0):
        self.tell, self.until = tell, until

    def on_start(self, done: int, rounds: int) -> None:
        """Where it begins."""
        self.rounds = rounds
        self._say(done)

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """One more."""
        self._say(state.done)

    def _say(self, done: int) -> None:
        text = f"round {done}/{self.rounds}" if done < self.rounds else "evaluating"
        self.tell(self.until * done / self.rounds, text)

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round."""
        self.tell(self.until + (1.0 - self.until) * done / clients, f"client {done}/{clients}")
