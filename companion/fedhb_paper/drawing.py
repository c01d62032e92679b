"""Figures as files, drawn with matplotlib: NAME.png and NAME.svg, the same bytes for the same figure."""

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
"""Of a legend."""
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
    """Write the figure as PNG and as SVG."""
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
        named = [one for one in figure.series if not one.faint]
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


def _points(one: Series) -> tuple[list[Any], list[float], list[float]]:
    """x, y and spread where there is a value."""
    spread = one.spread or [None] * len(one.y)
    rows = [(x, y, s or 0.0) for x, y, s in zip(one.x, one.y, spread, strict=True) if y is not None]
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


def _lines(axes: Any, figure: Figure) -> None:
    for one in figure.series:
        x, y, spread = _points(one)
        mark = MARKS[one.style.mark] if len(x) <= MARKED and not one.faint else None
        look = {
            "color": one.style.colour,
            "linestyle": DASHES[one.style.dash],
            "marker": mark,
            "markersize": 4,
        }
        axes.plot(
            x,
            y,
            label=None if one.faint else one.name,
            linewidth=0.9 if one.faint else 1.8,
            alpha=0.45 if one.faint else 1,
            **look,
        )
        if any(spread):
            low, high = ([b + sign * s for b, s in zip(y, spread, strict=True)] for sign in (-1, 1))
            floor = [max(v, 0.5 * b) for v, b in zip(low, y, strict=True)] if figure.log_y else low
            axes.fill_between(x, floor, high, color=one.style.colour, alpha=0.15, linewidth=0)


def _bars(axes: Any, figure: Figure) -> None:
    groups = list(dict.fromkeys(x for one in figure.series for x in one.x))
    width = 0.8 / max(1, len(figure.series))
    for k, one in enumerate(figure.series):
        x, y, spread = _points(one)
        places = [groups.index(name) + (k - (len(figure.series) - 1) / 2) * width for name in x]
        axes.bar(
            places,
            y,
            width,
            yerr=spread if any(spread) else None,
            label=one.name,
            color=one.style.colour,
            capsize=2,
        )
    axes.set_xticks(range(len(groups)), groups)


def draw_all(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Every figure that shows something."""
    return [
        path
        for figure in figures
        if any(y is not None for one in figure.series for y in one.y)
        for path in draw(figure, folder)
    ]
