"""Plots as JSON for the page's script: a `Figure`, a heat map, points, or several of them to choose from.

Every plot has `id`, `type`, `title`, `note` (what to look for) and `alt` (the same in words, for whoever does not see it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedhb.report.figures import Figure, Series

Plot = dict[str, Any]
DIGITS = 5


def short(value: Any) -> Any:
    """Numbers of five digits; None for what is no number."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: short(one) for key, one in value.items()}
    return [short(one) for one in value] if isinstance(value, (list, tuple)) else value


def figure(
    shown: Figure, note: str = "", x_choices: Mapping[str, str] | None = None, **more: Any
) -> Plot:
    """Lines or bars. With `x_choices` every series' x is a mapping: one list for each choice of the horizontal axis."""
    return {
        "id": shown.name,
        "type": shown.kind,
        "title": shown.title,
        "note": note,
        "alt": shown.description,
        "x": {"label": shown.x_label, "log": shown.log_x},
        "y": {"label": shown.y_label, "log": shown.log_y, "percent": shown.percent},
        "series": [series(one) for one in shown.series],
        **({"x_choices": dict(x_choices)} if x_choices else {}),
        **more,
    }


def series(one: Series) -> dict[str, Any]:
    """A line or a group of bars."""
    found = {
        "name": one.name,
        "x": short(one.x),
        "y": short(list(one.y)),
        "colour": one.style.colour,
        "dash": one.style.dash,
    }
    if one.spread is not None and any(value is not None for value in one.spread):
        found["spread"] = short(list(one.spread))
    return found | ({"faint": True} if one.faint else {})


def heat(
    name: str, title: str, rows: Sequence[Any], columns: Sequence[Any], values: Sequence[Sequence[float | None]],
    labels: tuple[str, str, str], note: str = "", alt: str = "", **more: Any,
) -> Plot:  # fmt: skip
    """A heat map; `labels` name its rows, its columns and its values."""
    return {
        "id": name, "type": "heat", "title": title, "note": note, "alt": alt, "rows": [str(r) for r in rows],
        "columns": [str(c) for c in columns], "values": short([list(row) for row in values]), "labels": list(labels), **more,
    }  # fmt: skip


def points(
    name: str, title: str, axes: tuple[str, str], groups: Sequence[Mapping[str, Any]], **more: Any
) -> Plot:
    """Points; each group has a name, a colour and points [x, y, label]."""
    found = [{**group, "points": short(list(group["points"]))} for group in groups]
    return {
        "id": name,
        "type": "points",
        "title": title,
        "x": {"label": axes[0]},
        "y": {"label": axes[1]},
        "series": found,
        **more,
    }


def choices(
    name: str, title: str, label: str, options: Mapping[str, Plot], note: str = ""
) -> Plot | None:
    """One of several plots, by a list to choose from; the plot itself where there is but one."""
    if not options:
        return None
    if len(options) == 1:
        only, plot = next(iter(options.items()))
        return {
            **plot,
            "id": name,
            "title": f"{title}: {only}",
            "note": f"{note} {plot.get('note', '')}".strip(),
        }
    return {
        "id": name, "type": "choices", "title": title, "note": note, "label": label,
        "alt": next(iter(options.values()))["alt"], "options": dict(options),
    }  # fmt: skip


def thinned(count: int, most: int = 640) -> list[int]:
    """At most about `most` positions of `count`, evenly, with the first and the last."""
    step = max(1, math.ceil(count / most))
    return sorted({*range(0, count, step), count - 1}) if count else []
