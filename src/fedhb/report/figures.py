"""Figures as plain data: `fedhb report` draws them in a page, `fedhb paper` with matplotlib.

A method has the same colour in every figure. The colours are based on those of Okabe and Ito, which
colour-blind readers can distinguish; each has a contrast of at least 3 to 1 to a white background
and to a black one.
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
    """The colour, dashes and marks of a method in all figures."""

    colour: str
    dash: str = "solid"
    mark: str = "circle"


GREY = Style("#8a8f98")
"""The style of values that are shown for comparison."""


@dataclass(frozen=True)
class Series:
    """One line, or one group of bars.

    Attributes:
        name: the name in the legend.
        x: the places on the horizontal axis.
        y: the value at each place, or None.
        spread: the standard deviation of each value, or None.
        style: how it is drawn.
        faint: whether it is drawn thin, behind the others.
    """

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
        title: the title.
        x_label, y_label: the names of the axes, with units.
        series: the lines or bars.
        kind: "lines" or "bars" (x are then the groups' names).
        log_x, log_y: whether an axis is logarithmic.
        percent: whether y is a share, shown in per cent.
        description: a description in words, for readers who cannot see the figure.
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
    """Choose a style for each name: the colour of its algorithm, and other dashes for each name.

    Args:
        names: the names of the methods.
        algorithms: the algorithm of each name; by default the first word of the name.
    """
    algorithms = list(algorithms or [name.split(" ")[0] for name in names])
    others = dict.fromkeys(kind for kind in algorithms if kind not in ALGORITHMS)
    order = [*ALGORITHMS, *others]
    colours: dict[str, int] = {}
    for algorithm in [kind for kind in order if kind in algorithms]:
        # The first algorithms always have the same colour; the others get one that is free here.
        free = [k for k in range(len(COLOURS)) if k not in colours.values()]
        place = order.index(algorithm)
        if place >= len(COLOURS):
            place = free[-1] if free else place % len(COLOURS)
        colours[algorithm] = place
    style_of: dict[str, Style] = {}
    times_used: dict[int, int] = {}
    pairs = zip(names, algorithms, strict=True)
    for name, algorithm in sorted(pairs, key=lambda pair: order.index(pair[1])):
        colour = colours[algorithm]
        turn = times_used.get(colour, 0)
        times_used[colour] = turn + 1
        style_of[name] = Style(
            COLOURS[colour], DASHES[turn % len(DASHES)], MARKS[turn % len(MARKS)]
        )
    return style_of


def mean_and_spread(
    rows: Sequence[Sequence[float | None]],
) -> tuple[list[float | None], list[float | None]]:
    """Compute the mean and the standard deviation over rows of values, position by position.

    Rows may have different lengths; None and values that are not finite are left out. The deviation
    of fewer than two values is None.
    """
    means: list[float | None] = []
    spreads: list[float | None] = []
    for k in range(max((len(row) for row in rows), default=0)):
        column = [row[k] for row in rows if k < len(row)]
        values = [float(value) for value in column if value is not None and math.isfinite(value)]
        means.append(statistics.fmean(values) if values else None)
        spreads.append(statistics.stdev(values) if len(values) > 1 else None)
    return means, spreads
