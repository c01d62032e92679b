"""The settings of many runs: those of cells, each with several variants.

    [common]                                        # settings of every run
    num_clients = 100
    [cells."mnist, tau=5"]                          # what a cell changes
    dataset = "mnist"
    local_epochs = 5
    [variants]                                      # what is compared: an algorithm, its settings
    niw = {}
    "niw S=10" = {algorithm = "niw", niw = {num_samples = 10}}

A variant overrides its cell, a cell the common settings; tables of algorithms are merged name by
name. A key {"cell", "variant", "seed"} names one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedhb import data
from fedhb.algorithms import ALGORITHMS, build
from fedhb.data.dataset import Dataset
from fedhb.errors import InputError
from fedhb.files import file_hash
from fedhb.network import nets
from fedhb.runs.records import MISSING, Key
from fedhb.runs.settings import Settings, flat_fields

SOURCES = {"data": "dataset", "dataset": "data"}
"""Where examples come from, and which setting that takes the place of."""

OF_CELLS = ("seeds", "only")
"""The keys of a cell that are no settings of its runs."""

LEFT_OUT = ("workers", "device", "checkpoint_every", "data")
"""Settings that no result depends on, or that `resolved` treats apart."""


def settings_of(grid: Mapping[str, Any], key: Key) -> Settings:
    """Return the settings of one run, in one process."""
    merged: dict[str, Any] = {}
    cell, variant = key["cell"], key["variant"]
    for layer in (grid.get("common", {}), grid["cells"][cell], grid["variants"][variant]):
        if set(SOURCES) <= set(layer):
            raise InputError(
                f"cell {cell!r} has both data={layer['data']!r} and "
                f"dataset={layer['dataset']!r}: give one"
            )
        for name, value in layer.items():
            if name in OF_CELLS:
                continue
            if name in SOURCES:  # a file takes the place of a data set, and the other way round
                merged.pop(SOURCES[name], None)
            if isinstance(value, Mapping):
                below = merged.get(name, {})
                value = {**({"name": below} if isinstance(below, str) else below), **value}
            merged[name] = value
    algorithm = merged.pop("algorithm", variant)
    merged = {
        name: value for name, value in merged.items() if name not in ALGORITHMS or name == algorithm
    }
    try:
        return Settings.resolve(merged, {"algorithm": algorithm, "seed": key["seed"], "workers": 1})
    except InputError as error:
        raise InputError(f"cell {cell!r}, variant {variant!r}: {error}") from None


def resolved(grid: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return every setting that the result of a run depends on (see `flat`).

    A file of the user's is named, and its content given by its hash.
    """
    chosen = settings_of(grid, key)
    file = chosen.data.file
    if not file:
        return flat(chosen)
    return flat(chosen) | {"dataset": Path(file).name, "data": file_hash(file)}


def flat(chosen: Settings) -> dict[str, Any]:
    """Return the settings that a result depends on, in one table.

    Those of the algorithm and of the model are named TABLE.NAME.
    """
    settings = {name: v for name, v in chosen.flat().items() if name not in LEFT_OUT}
    settings["model"] = chosen.model.name or nets.DEFAULT.get(chosen.title, "mlp")
    algorithm: Any = build(chosen.algorithm, chosen.options.get(chosen.algorithm, {}))
    for name, value in dataclasses.asdict(algorithm).items():
        settings[f"{chosen.algorithm}.{name}"] = value
    for name, value in chosen.options.get("model", {}).items():
        settings[f"model.{name}"] = value
    return settings


def with_defaults(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the settings, with the default of each of these names that they do not have.

    A record that was made before a setting existed has no value for it; the default of a new
    setting leaves results as they were.
    """
    values = {name: default(name) for name in names}
    return {name: value for name, value in values.items() if value is not MISSING} | dict(settings)


def default(name: str) -> Any:
    """Return the default of a setting, given its name in `flat`; MISSING where it has none."""
    table, dot, field = name.partition(".")
    if not dot:
        return flat_fields()[name][1].default if name in flat_fields() else MISSING
    if table not in ALGORITHMS:
        return MISSING
    defaults = {f.name: f.default for f in dataclasses.fields(ALGORITHMS[table])}
    return defaults.get(field, MISSING)


def missing_data(settings: Iterable[Mapping[str, Any]], remedies: bool = True) -> dict[str, str]:
    """Return the data sets that are not here, of those that resolved settings name.

    Each comes with what to do about it, or where to read that.
    """
    here = {status.name: status for status in data.status()}
    missing = {}
    for names in settings:
        if "dataset" not in names:
            continue
        name = str(names["dataset"])
        if "data" in names:
            if names["data"] == "":
                missing[name] = "there is no such file from here"
        elif name not in here:
            missing[name] = "it is not a data set of fedhb yet"
        elif not here[name].present:
            missing[name] = here[name].remedy if remedies else "see `fedhb data`"
    return missing


def dataset_of(name: str, path: str = "") -> Dataset:
    """Return a data set, or the one in the user's file, and keep it for the next run.

    A file that has changed is read again.
    """
    return _dataset_of(name, path, file_hash(path) if path else "")


@lru_cache(maxsize=1)
def _dataset_of(name: str, path: str, _: str) -> Dataset:
    return data.read_table(path) if path else data.load(name)
