"""Cells with another width of the network, or with a part of the rounds.

Such a cell is one of its own, and its name says so:

    "s=100 f=0.1 tau=1"                              320 rounds at full width
    "s=100 f=0.1 tau=1 width=0.25 rounds=0.5"        160 rounds, channel counts times 0.25

Records of several widths are thus side by side in one file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedhb.errors import InputError
from fedhb.runs.settings import TrainingSettings


@dataclass(frozen=True)
class Scale:
    """The factors of a cell: the network's width, and the share of the rounds."""

    width: float = 1.0
    rounds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.width < float("inf"):
            raise InputError(f"width={self.width}: give a positive number, such as 0.25")
        if not 0 < self.rounds <= 1:
            raise InputError(
                f"rounds={self.rounds}: give the share of each cell's rounds, "
                "above 0 and at most 1, such as 0.5"
            )

    @property
    def changes(self) -> dict[str, float]:
        """The factors that are not 1."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != 1}


def name(cell: str, scale: Scale) -> str:
    """Return the name of a cell at this scale."""
    return " ".join([cell, *(f"{key}={value:g}" for key, value in scale.changes.items())])


def parse(cell: str) -> tuple[str, Scale]:
    """Return a cell's name without its scale, and the scale."""
    parts = re.fullmatch(r"(.*?)(?: width=(\S+))?(?: rounds=(\S+))?", cell)
    assert parts is not None
    try:
        return parts[1], Scale(float(parts[2] or 1), float(parts[3] or 1))
    except (ValueError, InputError):
        return cell, Scale()


def scaled(settings: Mapping[str, Any], scales: Sequence[Scale]) -> dict[str, Any]:
    """Return an experiment's settings with every cell at each of these scales."""
    if not settings.get("cells"):
        raise InputError(
            "this experiment has no cells that could have another width or fewer rounds: "
            "leave out --width and --rounds"
        )
    cells = {}
    for cell, values in settings["cells"].items():
        for scale in scales:
            changed = dict(values)
            if scale.width != 1:
                model = values.get("model", {})
                changed["model"] = {
                    **({"name": model} if isinstance(model, str) else model),
                    "width": scale.width,
                }
            if scale.rounds != 1:
                common = settings.get("common", {})
                rounds = values.get("rounds", common.get("rounds", TrainingSettings.rounds))
                changed["rounds"] = max(1, round(scale.rounds * rounds))
            cells[name(cell, scale)] = changed
    return {**settings, "cells": cells}
