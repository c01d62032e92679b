"""Plots as JSON for the page's script.

A plot is a `Figure`, a heat map, points, or several plots to choose from. Every plot has `id`,
`type`, `title`, `note` (explains what to look for) and `alt` (a description in words, for readers
who cannot see the plot).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedhb.evaluation.observer import rounded
from fedhb.report.figures import Figure, Series

Plot = dict[str, Any]


def figure(
    shown: Figure, note: str = "", x_choices: Mapping[str, str] | None = None, **options: Any
) -> Plot:
    """Make a plot of lines or bars.

    Args:
        shown: the figure. With `x_choices`, x of each of its series is a mapping that has a list
            for each choice.
        note: explains what to look for.
        x_choices: the label of each choice of the horizontal axis.
        options: more entries of the plot.
    """
    return {
        "id": shown.name,
        "type": shown.kind,
        "title": shown.title,
        "note": note,
        "alt": shown.description,
        "x": {"label": shown.x_label, "log": shown.log_x},
        "y": {"label": shown.y_label, "log": shown.log_y, "percent": shown.percent},
        "series": [_series(line) for line in shown.series],
        **({"x_choices": dict(x_choices)} if x_choices else {}),
        **options,
    }


def _series(line: Series) -> dict[str, Any]:
    entries = {
        "name": line.name,
        "x": rounded(dict(line.x) if isinstance(line.x, Mapping) else list(line.x)),
        "y": rounded(list(line.y)),
        "colour": line.style.colour,
        "dash": line.style.dash,
    }
    if line.spread is not None and any(value is not None for value in line.spread):
        entries["spread"] = rounded(list(line.spread))
    return entries | ({"faint": True} if line.faint else {})


def heat(
    name: str,
    title: str,
    rows: Sequence[Any],
    columns: Sequence[Any],
    values: Sequence[Sequence[float | None]],
    labels: tuple[str, str, str],
    **options: Any,
) -> Plot:
    """Make a heat map; `labels` name its rows, its columns and its values."""
    return {
        "id": name,
        "type": "heat",
        "title": title,
        "note": "",
        "alt": "",
        "rows": [str(row) for row in rows],
        "columns": [str(column) for column in columns],
        "values": rounded([list(row) for row in values]),
        "labels": list(labels),
        **options,
    }


def points(
    name: str,
    title: str,
    axes: tuple[str, str],
    groups: Sequence[Mapping[str, Any]],
    **options: Any,
) -> Plot:
    """Make a plot of points; each group has a name, a colour and points [x, y, label]."""
    return {
        "id": name,
        "type": "points",
        "title": title,
        "x": {"label": axes[0]},
        "y": {"label": axes[1]},
        "series": [{**group, "points": rounded(list(group["points"]))} for group in groups],
        **options,
    }


def choices(
    name: str, title: str, label: str, options: Mapping[str, Plot], note: str = ""
) -> Plot | None:
    """Make a plot with a list of options to choose from; a single option needs no list."""
    if not options:
        return None
    if len(options) == 1:
        option, plot = next(iter(options.items()))
        return {
            **plot,
            "id": name,
            "title": f"{title}: {option}",
            "note": f"{note} {plot.get('note', '')}".strip(),
        }
    return {
        "id": name,
        "type": "choices",
        "title": title,
        "note": note,
        "label": label,
        "alt": next(iter(options.values()))["alt"],
        "options": dict(options),
    }


def thinned(count: int, limit: int = 640) -> list[int]:
    """Return about `limit` positions of `count` at most, evenly, with the first and the last."""
    step = max(1, math.ceil(count / limit))
    return sorted({*range(0, count, step), count - 1}) if count else []


def by_largest(rows: Sequence[Sequence[float]]) -> list[int]:
    """Sort rows by the position of their largest value, then from its largest to its smallest."""
    return sorted(range(len(rows)), key=lambda k: (rows[k].index(max(rows[k])), -max(rows[k])))
