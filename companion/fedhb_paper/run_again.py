"""Records that are made a second time, to compare them with the first."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from fedhb.runs.records import Key, identity
from fedhb_paper import workbench
from fedhb_paper.experiments import Experiment

AGAIN = ".again"
"""The folder, beside the records, of those that are made a second time."""

LEFT_OUT = ("seconds", "data")
"""Results that differ every time, or are no numbers."""


def second(experiment: Experiment, keys: Sequence[Key]) -> Experiment:
    """Return the experiment with another folder, inside its own.

    Records that are complete there are deleted.
    """
    path = experiment.path / AGAIN / experiment.name
    repeated = replace(experiment, path=path)
    if path.exists() and not workbench.standing(repeated, keys).missing:
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return repeated


def differences(first: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of every number that both have.

    It has the means, and the largest difference between the two values of one record.
    """
    before = {identity(record["key"]): dict(numbers(record["result"])) for record in first}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for record in again:
        for name, value in numbers(record["result"]):
            if name in before.get(identity(record["key"]), {}):
                pairs.setdefault(name, []).append((before[identity(record["key"])][name], value))
    table = Table("number", title="recorded, and made again")
    for header in ("records", "recorded", "again", "largest difference"):
        table.add_column(header, justify="right")
    for name, values in pairs.items():
        means = [f"{statistics.fmean(side):.4f}" for side in zip(*values, strict=True)]
        table.add_row(name, str(len(values)), *means, f"{max(abs(a - b) for a, b in values):.4f}")
    return table


def numbers(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a nested result, by the path to them; lists are left out."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            if key not in LEFT_OUT:
                yield from numbers(value, f"{name} {key}".strip())
    elif isinstance(result, (int, float)) and not isinstance(result, bool):
        yield name, float(result)
