"""Run what an experiment has no record of yet."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhb.errors import InputError
from fedhb.runs import records
from fedhb.runs.jobs import Watcher, Work, record_all
from fedhb.runs.records import FILE, Effective, Inventory, Key, identity
from fedhb.runs.run_grid import missing_data, with_defaults
from fedhb_paper.experiments import KINDS, Experiment, load, names
from fedhb_paper.scale import parse


def standing(experiment: Experiment, keys: Sequence[Key]) -> Inventory:
    """Return the records that exist of these keys, and which are missing."""
    wanted = [(key, experiment.resolved(key)) for key in keys]
    return Inventory.of(experiment.path / FILE, wanted, _effective(experiment))


def _effective(experiment: Experiment) -> Effective:
    if hasattr(experiment.kind, "resolved"):
        return with_defaults
    return lambda settings, names: settings


def lacking(settings: Iterable[Mapping[str, Any]], remedies: bool = True) -> dict[str, str]:
    """Return the data sets that these settings need and that are not here (see `missing_data`)."""
    each = list(settings)
    clean = [{"dataset": values["clean"]} for values in each if "clean" in values]
    return missing_data([*each, *clean], remedies)


def complete(
    experiment: Experiment, keys: Sequence[Key], processes: int, watcher: Watcher
) -> Inventory:
    """Make the records that are missing, here and in the other tables, and return all."""
    for record in lent(experiment, standing(experiment, keys)):
        records.append(experiment.path / FILE, record)
    present = standing(experiment, keys)
    absent = lacking([present.settings[identity(key)] for key in present.missing])
    if absent:
        name, remedy = next(iter(absent.items()))
        raise InputError(
            f"{experiment.name} needs the data set {name}: {remedy}; or leave out the cells with it"
        )
    work = Work(
        experiment.path,
        experiment.kind.run,
        experiment.settings,
        partial(command, experiment.name),
    )
    record_all(work, present, processes, watcher)
    return standing(experiment, keys)


def lent(experiment: Experiment, present: Inventory) -> list[dict[str, Any]]:
    """Return the records that other tables have of what is missing here.

    The same settings give the same result. These records keep the command that made them, and
    say whose they were (`of`).
    """
    if experiment.kind.__name__ != KINDS["table"] or not present.missing:
        return []
    others: list[tuple[str, dict[str, Any]]] = []
    folder = experiment.path.parent
    for name in names(folder):
        with contextlib.suppress(InputError):  # a mistake in another table is not this one's
            if name != experiment.name and load(folder, name).settings.get("kind") == "table":
                others += [(name, record) for record in records.read(folder / name / FILE)]
    borrowed = []
    for key in present.missing:
        settings = present.settings[identity(key)]
        for name, record in reversed(others):  # the newest first
            if "result" in record and not records.changed(record, settings, with_defaults):
                borrowed.append({**record, "key": dict(key), "of": record.get("of", name)})
                break
    return borrowed


def command(name: str, key: Key) -> str:
    """Return the command that makes a record of the experiment `name` again."""
    cell, scale = parse(str(key.get("cell", "")))
    parts = {part: key[part] for part in ("cell", "variant", "seed") if part in key}
    parts |= ({"cell": cell} if "cell" in parts else {}) | scale.changes
    options = {"variant": "algorithms", "seed": "seeds"}
    words = ["fedhb", "paper", name]
    for part, value in parts.items():
        words += [f"--{options.get(part, part)}", f"{value}"]
    return shlex.join(words)
