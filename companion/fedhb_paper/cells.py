"""The cells and variants of an experiment: the keys of its records, and what each depends on.

settings.toml is as `fedhb.runs.run_grid` describes it, with two more settings:

    seeds = [0, 1, 2]
    [cells."mnist, tau=5"]
    seeds = [0]                                     # its own, instead of those above
    only = ["niw"]                                  # these variants alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.runs import run_grid
from fedhb.runs.from_settings import make_clients
from fedhb.runs.records import Key
from fedhb.runs.run import Run
from fedhb.runs.run_grid import dataset_of
from fedhb.runs.settings import Settings
from fedhb.settings_fields import did_you_mean


def work(settings: Mapping[str, Any]) -> list[Key]:
    """Return a key for every seed, cell and variant; all of a seed before the next one."""
    for name in ("seeds", "cells", "variants"):
        if not settings.get(name):
            raise InputError(f"settings.toml has no {name}: give some")
    variants = settings["variants"]
    for name, cell in settings["cells"].items():
        for variant in cell.get("only", ()):
            if variant not in variants:
                raise InputError(
                    f"cell {name!r}: only has {variant!r}{did_you_mean(variant, variants)}: "
                    "no such variant"
                )
    of_cells = [seed for cell in settings["cells"].values() for seed in cell.get("seeds", ())]
    return [
        {"cell": name, "variant": variant, "seed": seed}
        for seed in dict.fromkeys([*settings["seeds"], *of_cells])
        for name, cell in settings["cells"].items()
        if seed in cell.get("seeds", settings["seeds"])
        for variant in cell.get("only", variants)
    ]


def resolved(settings: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return every setting that the result of a key depends on."""
    clean = {"clean": settings["clean"]} if "clean" in settings else {}
    return run_grid.resolved(settings, key) | clean


def clients_of(run: Run, settings: Settings) -> tuple[Clients, Clients | None]:
    """Return the clients of a run and its novel ones, on the device of its network."""
    clients, novel = make_clients(settings, dataset_of(settings.data.dataset, settings.data.file))
    device = str(run.problem.network.device)
    return clients.to(device), novel.to(device) if novel is not None else None
