"""The paper's numbers for a run that is one of the paper's cells, where the companion package is installed.

The companion has the entry point `fedhb.paper_numbers`: a function of a run's algorithm and settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

Printed = dict[tuple[str, str], tuple[float, float | None]]
"""(task, metric) -> mean and deviation, in the units of a result."""


def numbers(algorithm: str, settings: Mapping[str, Any]) -> tuple[str, Printed]:
    """Which cell of which table the run is, in words, and what the paper prints for it."""
    for entry in entry_points(group="fedhb.paper_numbers"):
        found: tuple[str, Printed] = entry.load()(algorithm, settings)
        return found
    return "", {}
