"""The clients: their labels, their metrics before and after personalisation, and a map of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedhb.report.figures import COLOURS, GREY, Figure, Series
from fedhb.report.plots import Plot, by_largest, choices, figure, heat, points
from fedhb.report.run_data import Method
from fedhb.report.tables import metric_name

LABEL_COLOURS = (*COLOURS, "#3f8f9e", "#b04f6f")
POINTS_AT_ONCE = 256
"""The number of points whose distances to all others are computed at once.

All distances at once would take gigabytes for 10,000 clients.
"""


@dataclass(frozen=True)
class ClientMetric:
    """A client's metric before and after personalisation."""

    client: Any
    before: float
    after: float


def label_heat(methods: Sequence[Method]) -> Plot | None:
    """Plot how many training examples of each label every client has.

    The plot is of one seed, because every seed deals the data anew.
    """
    runs = [m.first for m in methods]
    run = next((r for r in runs if r.evaluation and r.evaluation["clients"]["labels"]), None)
    if run is None or run.evaluation is None:
        return None
    clients = run.evaluation["clients"]
    counts = np.array(clients["labels"])
    order = by_largest(counts.tolist())
    held, sizes = (counts > 0).sum(1), counts.sum(1)
    num_labels = f"{held.min()} to {held.max()}" if held.min() < held.max() else f"{held.min()}"
    return heat(
        "labels",
        f"Labels of each client (seed {run.seed})",
        [f"label {k}" for k in range(counts.shape[1])],
        [clients["client"][k] for k in order],
        counts[order].T.tolist(),
        ("label", "client", "training examples"),
        note="Clients are sorted by the label they hold most of.",
        alt=f"{len(counts)} clients by {counts.shape[1]} labels. A client holds {num_labels} "
        f"labels and {sizes.min()} to {sizes.max()} examples.",
    )


def before_and_after(methods: Sequence[Method]) -> list[Plot]:
    """Plot every client's metric before and after personalisation, as points and sorted bars.

    Methods with different metrics, such as a regression's and a classification's, have different
    plots.
    """
    by_metric: dict[str, list[tuple[Method, list[ClientMetric]]]] = {}
    for method in methods:
        columns = method.first.per_client
        metrics = [key.removeprefix("global_") for key in columns if key.startswith("global_")]
        if metrics:
            before, after = columns[f"global_{metrics[0]}"], columns[f"personalised_{metrics[0]}"]
            names = columns.get("client") or list(range(len(before)))
            clients = [
                ClientMetric(name, b, a)
                for name, b, a in zip(names, before, after, strict=True)
                if b is not None and a is not None
            ]
            by_metric.setdefault(metrics[0], []).append((method, clients))
    return [
        plot
        for k, (metric, group) in enumerate(by_metric.items(), 1)
        for plot in _plots_of_metric(metric, group, "" if k == 1 else f"-{k}")
    ]


def _plots_of_metric(
    metric: str, methods: Sequence[tuple[Method, list[ClientMetric]]], suffix: str
) -> list[Plot]:
    name, high_is_better = metric_name(metric), metric == "accuracy"
    groups: list[dict[str, Any]] = []
    bars: dict[str, Plot] = {}
    descriptions = []
    for method, clients in methods:
        gained = sum(c.after > c.before if high_is_better else c.after < c.before for c in clients)
        descriptions.append(
            f"With {method.name} the {name} of {gained} of {len(clients)} clients is better after "
            "personalisation."
        )
        groups.append(
            {
                "name": method.name,
                "colour": method.style.colour,
                "mark": method.style.mark,
                "points": [[c.before, c.after, str(c.client)] for c in clients],
            }
        )
        bars[method.name] = _bars(method, clients, name, high_is_better)
    scatter = points(
        f"scatter{suffix}",
        f"Each client's {name}, before and after personalisation",
        (f"global {name}", f"personalised {name}"),
        groups,
        note=f"Personalisation improves the {name} of the clients "
        f"{'above' if high_is_better else 'below'} the diagonal.",
        alt=" ".join(descriptions),
        diagonal=True,
        percent=high_is_better,
    )
    title = f"Clients by their personalised {name}, worst first"
    sorted_bars = choices(f"bars{suffix}", title, "method", bars)
    return [scatter, *([sorted_bars] if sorted_bars else [])]


def _bars(method: Method, clients: Sequence[ClientMetric], name: str, high_is_better: bool) -> Plot:
    """Plot one method's clients as bars, worst first after personalisation."""
    order = sorted(clients, key=lambda c: c.after, reverse=not high_is_better)
    worst, median = order[0], order[len(order) // 2]
    x = [c.client for c in order]
    shown = Figure(
        "bars",
        method.name,
        "client",
        name,
        [
            Series("global", x, [c.before for c in order], style=GREY),
            Series("personalised", x, [c.after for c in order], style=method.style),
        ],
        kind="bars",
        percent=high_is_better,
        description=f"{method.name}: client {worst.client} has the worst {name}, {worst.after:.3g} "
        f"after personalisation and {worst.before:.3g} before; the median client has "
        f"{median.after:.3g}.",
    )
    return figure(shown)


def client_map(methods: Sequence[Method]) -> Plot | None:
    """Plot the clients' weights after personalisation on their two main directions.

    The colour is that of the label which the client holds most of.
    """
    options = {}
    for method in methods:
        evaluation = method.first.evaluation
        if not evaluation or len(evaluation["sketches"]) < 3:
            continue
        place, share = principal(np.array(evaluation["sketches"]))
        names, counts = evaluation["clients"]["client"], evaluation["clients"]["labels"]
        dominant = [int(np.argmax(row)) for row in counts] if counts else [0] * len(place)
        groups = [
            {
                "name": f"mostly label {label}" if counts else "clients",
                "colour": LABEL_COLOURS[label % len(LABEL_COLOURS)],
                "text": str(label) if counts else "",
                "points": [
                    [*place[k].tolist(), str(names[k])]
                    for k in range(len(place))
                    if dominant[k] == label
                ],
            }
            for label in sorted(set(dominant))
        ]
        alt = (
            f"{method.name}: {len(place)} clients on two directions that hold {100 * share:.0f} % "
            "of the variance of their weights."
        )
        if counts:
            alt += (
                f" {100 * neighbours(place, dominant):.0f} % of the clients have a nearest "
                "neighbour with the same dominant label."
            )
        options[method.name] = points(
            "map",
            method.name,
            ("first direction", "second direction"),
            groups,
            alt=alt,
            note=alt,
            plain=True,
        )
    note = (
        "Each client's weights mᵢ after personalisation, from random sketches of 64 numbers. "
        "Clients whose models are similar lie close together; the number in a point is the label "
        "which the client holds most of."
    )
    return choices("map", "Map of the clients", "method", options, note)


def principal(sketches: np.ndarray) -> tuple[np.ndarray, float]:
    """Project sketches [N, k] on their two main directions.

    Returns:
        (coordinates [N, 2], scaled to a largest value of 1; their share of the variance).
    """
    centred = sketches - sketches.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    place = u[:, :2] * s[:2]
    total = float((s**2).sum())
    share = float((s[:2] ** 2).sum() / total) if total else 0.0
    return place / max(float(np.abs(place).max()), 1e-30), share


def neighbours(place: np.ndarray, labels: Sequence[int]) -> float:
    """Return the share of points [N, 2] whose nearest neighbour has the same label."""
    starts = range(0, len(place), POINTS_AT_ONCE)
    nearest = np.concatenate([_nearest(place, start) for start in starts])
    return float(np.mean([labels[k] == labels[int(n)] for k, n in enumerate(nearest)]))


def _nearest(place: np.ndarray, start: int) -> np.ndarray:
    """Return the nearest other point of each of the `POINTS_AT_ONCE` points from `start` on."""
    rows = np.arange(start, min(start + POINTS_AT_ONCE, len(place)))
    x_gaps, y_gaps = (place[rows, None, axis] - place[None, :, axis] for axis in (0, 1))
    distances = x_gaps**2 + y_gaps**2
    distances[np.arange(len(rows)), rows] = np.inf
    nearest: np.ndarray = distances.argmin(1)
    return nearest
