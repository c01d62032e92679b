"""A cell with another width of the network, or with a part of its rounds: a cell of its own, whose name says so.

    "s=100 f=0.1 tau=1"                                      320 rounds at full width
    "s=100 f=0.1 tau=1 width=0.25 rounds=0.5"                160 rounds, every channel count times 0.25

So records of several widths live side by side, and nothing else needs to know of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedhb.errors import InputError
from fedhb.runs.settings import Settings


@dataclass(frozen=True)
class Scale:
    """What a cell is scaled by: the network's width, and the share of the rounds."""

    width: float = 1.0
    rounds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.width < float("inf"):
            raise InputError(f"width={self.width}: give a positive number, such as 0.25")
        if not 0 < self.rounds <= 1:
            raise InputError(
                f"rounds={self.rounds}: give the share of each cell's rounds, above 0 and at most 1, such as 0.5"
            )

    @property
    def changes(self) -> dict[str, float]:
        """What is not as it was."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != 1}


def name(cell: str, scale: Scale) -> str:
    """The name of a cell at this scale."""
    return " ".join([cell, *(f"{key}={value:g}" for key, value in scale.changes.items())])


def parse(cell: str) -> tuple[str, Scale]:
    """A cell's name without its scale, and that."""
    found = re.fullmatch(r"(.*?)(?: width=(\S+))?(?: rounds=(\S+))?", cell)
    assert found is not None
    try:
        return found[1], Scale(float(found[2] or 1), float(found[3] or 1))
    except (ValueError, InputError):
        return cell, Scale()


def scaled(settings: Mapping[str, Any], scales: Sequence[Scale]) -> dict[str, Any]:
    """An experiment's settings with every cell at each of these scales."""
    if not settings.get("cells"):
        raise InputError(
            "this experiment has no cells that could have another width or fewer rounds: leave out --width and --rounds"
        )
    found = {}
    for cell, own in settings["cells"].items():
        for scale in scales:
            changed = dict(own)
            if scale.width != 1:
                model = own.get("model", {})
                changed["model"] = {
                    **({"name": model} if isinstance(model, str) else model),
                    "width": scale.width,
                }
            if scale.rounds != 1:
                rounds = own.get(
                    "rounds", settings.get("common", {}).get("rounds", Settings.rounds)
                )
                changed["rounds"] = max(1, round(scale.rounds * rounds))
            found[name(cell, scale)] = changed
    return {**settings, "cells": found}
