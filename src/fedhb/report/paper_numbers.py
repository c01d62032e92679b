"""The paper's numbers for a run that is one of the paper's cells.

They come from the companion package, if it is installed. Its entry point `fedhb.paper_numbers` is a
function of a run's algorithm and settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

Printed = dict[tuple[str, str], tuple[float, float | None]]
"""(task, metric) -> mean and deviation, in the units of a result."""


def numbers(algorithm: str, settings: Mapping[str, Any]) -> tuple[str, Printed]:
    """Return (the cell of the paper's table that the run is, in words; its printed numbers)."""
    for entry in entry_points(group="fedhb.paper_numbers"):
        cell_and_numbers: tuple[str, Printed] = entry.load()(algorithm, settings)
        return cell_and_numbers
    return "", {}
