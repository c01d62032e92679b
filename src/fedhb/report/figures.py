"""Figures as plain data: what `fedhb report` draws in a page and `fedhb paper` draws with matplotlib.

A figure says what is shown; who draws it decides how. A method has the same colour in every figure: Okabe and Ito's hues, which
the colour-blind tell apart, each dark and light enough to have three times the contrast of a white and of a black ground.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedhb.runs.settings import ALGORITHMS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c0659a", "#a87900", "#7b61c9", "#808080", "#9c4f3f")
DASHES = ("solid", "dashed", "dotted")
MARKS = ("circle", "rect", "triangle", "diamond")


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere."""

    colour: str
    dash: str = "solid"
    mark: str = "circle"


@dataclass(frozen=True)
class Series:
    """One line or one group of bars: a value (None: none) for every x, and how far values spread around it."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    spread: Sequence[float | None] | None = None
    style: Style = field(default_factory=lambda: Style(COLOURS[0]))
    faint: bool = False


@dataclass(frozen=True)
class Figure:
    """Lines or bars on two axes.

    Attributes:
        name: a file name.
        title: what it shows.
        x_label, y_label: the axes, with units.
        series: what is drawn.
        kind: "lines" or "bars" (x are then the groups' names).
        log_x, log_y: whether an axis is logarithmic.
        percent: whether y is a share, shown in per cent.
        description: the same in words, for whoever does not see it.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    description: str = ""


def styles(names: Sequence[str], algorithms: Sequence[str] | None = None) -> dict[str, Style]:
    """A style for each name: that of its algorithm, and for several names of one algorithm different dashes.

    `algorithms` has the algorithm of each name; by default a name is its own, or begins with it.
    """
    kinds = list(algorithms or [name.split(" ")[0] for name in names])
    order = [*ALGORITHMS, *dict.fromkeys(kind for kind in kinds if kind not in ALGORITHMS)]
    present = [kind for kind in order if kind in kinds]
    colours: dict[str, int] = {}
    for kind in (
        present
    ):  # the first ones have a colour of their own; the others take one that is free here
        free = [k for k in range(len(COLOURS)) if k not in colours.values()]
        own = order.index(kind)
        colours[kind] = own if own < len(COLOURS) else free[-1] if free else own % len(COLOURS)
    found: dict[str, Style] = {}
    used: dict[int, int] = {}
    for name, kind in sorted(zip(names, kinds, strict=True), key=lambda pair: order.index(pair[1])):
        turn = used.get(colours[kind], 0)
        used[colours[kind]] = turn + 1
        found[name] = Style(
            COLOURS[colours[kind]], DASHES[turn % len(DASHES)], MARKS[turn % len(MARKS)]
        )
    return found


def mean_and_spread(
    rows: Sequence[Sequence[float | None]],
) -> tuple[list[float | None], list[float | None]]:
    """The mean and the standard deviation (None for one row) over rows of values, position by position."""
    means: list[float | None] = []
    spreads: list[float | None] = []
    for k in range(max((len(row) for row in rows), default=0)):
        every = [row[k] for row in rows if k < len(row)]
        values = [float(value) for value in every if value is not None and math.isfinite(value)]
        means.append(statistics.fmean(values) if values else None)
        spreads.append(statistics.stdev(values) if len(values) > 1 else None)
    return means, spreads
