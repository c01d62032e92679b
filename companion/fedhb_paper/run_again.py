"""Records made a second time, beside those that are there: does it come out the same?"""

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
"""The folder, beside the records, of those made a second time."""

LEFT_OUT = ("seconds", "data")
"""Results that are another number every time, or none at all."""


def second(experiment: Experiment, keys: Sequence[Key]) -> Experiment:
    """The experiment with a folder of its own inside the first one's; what is complete there is begun anew."""
    path = experiment.path / AGAIN / experiment.name
    found = replace(experiment, path=path)
    if path.exists() and not workbench.standing(found, keys).missing:
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return found


def differences(first: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> Table:
    """Every number of the results that both have: the means, and how far one record's two values are apart at most."""
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
        table.add_row(
            name, str(len(values)), *means, f"{max(abs(one - other) for one, other in values):.4f}"
        )
    return table


def numbers(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested result, by the path to them; lists are left out."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            if key not in LEFT_OUT:
                yield from numbers(value, f"{name} {key}".strip())
    elif isinstance(result, (int, float)) and not isinstance(result, bool):
        yield name, float(result)
