"""Figures as files, drawn with matplotlib: NAME.png and NAME.svg.

A figure always gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.files import write_atomically
from fedhb.report.figures import Figure, Series

DASHES = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1.5, 1.5))}
MARKS = {"circle": "o", "rect": "s", "triangle": "^", "diamond": "D"}
COLUMNS = 3
"""The columns of a legend."""
MARKED = 30
"""Lines with at most so many points show them."""
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": "#d9dde2",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedhb",
}


def draw(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure as PNG and as SVG, and return the paths."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise InputError("figures need the package matplotlib: pip install matplotlib") from None
    paths = []
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(6.4, 4.0), layout="constrained")
        axes = canvas.subplots()
        (_bars if figure.kind == "bars" else _lines)(axes, figure)
        axes.set(xlabel=figure.x_label, ylabel=figure.y_label, title=figure.title)
        if figure.log_x:
            axes.set_xscale("log")
        if figure.log_y:
            axes.set_yscale("log")
        if figure.percent:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        named = [series for series in figure.series if not series.faint]
        if len(named) > 1:
            rows = -(-len(named) // COLUMNS)
            canvas.set_size_inches(6.4, 3.8 + 0.22 * rows)
            canvas.legend(loc="outside lower center", ncols=min(COLUMNS, len(named)))
        for kind in ("png", "svg"):
            content = io.BytesIO()
            about: dict[str, Any] = {
                "Title": figure.title,
                "Description": figure.description,
                "Software": None,
            }
            if kind == "svg":
                about = {"Title": figure.title, "Description": figure.description, "Date": None}
            canvas.savefig(content, format=kind, dpi=150, metadata=about)
            paths.append(folder / f"{figure.name}.{kind}")
            write_atomically(paths[-1], content.getvalue())
    return paths


def _points(series: Series) -> tuple[list[Any], list[float], list[float]]:
    """Return x, y and spread where there is a value."""
    spread = series.spread or [None] * len(series.y)
    rows = [
        (x, y, s or 0.0)
        for x, y, s in zip(series.x, series.y, spread, strict=True)
        if y is not None
    ]
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


def _lines(axes: Any, figure: Figure) -> None:
    for series in figure.series:
        x, y, spread = _points(series)
        mark = MARKS[series.style.mark] if len(x) <= MARKED and not series.faint else None
        look = {
            "color": series.style.colour,
            "linestyle": DASHES[series.style.dash],
            "marker": mark,
            "markersize": 4,
        }
        axes.plot(
            x,
            y,
            label=None if series.faint else series.name,
            linewidth=0.9 if series.faint else 1.8,
            alpha=0.45 if series.faint else 1,
            **look,
        )
        if any(spread):
            low, high = ([b + sign * s for b, s in zip(y, spread, strict=True)] for sign in (-1, 1))
            floor = [max(v, 0.5 * b) for v, b in zip(low, y, strict=True)] if figure.log_y else low
            axes.fill_between(x, floor, high, color=series.style.colour, alpha=0.15, linewidth=0)


def _bars(axes: Any, figure: Figure) -> None:
    groups = list(dict.fromkeys(x for series in figure.series for x in series.x))
    width = 0.8 / max(1, len(figure.series))
    for k, series in enumerate(figure.series):
        x, y, spread = _points(series)
        places = [groups.index(name) + (k - (len(figure.series) - 1) / 2) * width for name in x]
        axes.bar(
            places,
            y,
            width,
            yerr=spread if any(spread) else None,
            label=series.name,
            color=series.style.colour,
            capsize=2,
        )
    axes.set_xticks(range(len(groups)), groups)


def draw_all(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write every figure that shows something, and return the paths."""
    return [
        path
        for figure in figures
        if any(y is not None for series in figure.series for y in series.y)
        for path in draw(figure, folder)
    ]
