"""Uncertainty: reliability, confidence, rejection, and entropy on familiar and on unseen inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhb.report.figures import Figure, Series, Style, mean_and_spread
from fedhb.report.plots import Plot, choices, figure
from fedhb.report.run_data import Method
from fedhb.report.tables import LEVEL, TASKS
from fedhb.report.wording import listed

UNSEEN = Style("#d55e00")
FAMILIAR = Style("#0072b2")
MIN_EXAMPLES = 10
"""Bins of confidence with fewer examples are not shown."""
REJECTED_SHARE = 0.2
"""The descriptions say how good predictions are when this share of them is rejected."""

RELIABILITY = (
    "On the diagonal the accuracy of predictions is as high as their confidence; below it they are "
    "too confident. Shown are bins of confidence with at least ten examples."
)
COVERAGE = "On the diagonal, intervals hold as many targets as their level says."
REJECTION = (
    "The least certain predictions are rejected first: the better a model knows its own errors, "
    "the faster the curve improves."
)
ENTROPY = (
    "Predictions for inputs unlike the data should be less certain: their entropy should lie "
    "further to the right."
)


def records(method: Method, task: str, kind: str) -> list[dict[str, Any]]:
    """Return the records of reliability, coverage, rejection or entropy of a method's runs."""
    of_runs = [
        ((run.evaluation or {}).get("uncertainty") or {}).get(task) or {} for run in method.runs
    ]
    return [of_task[kind] for of_task in of_runs if kind in of_task]


def plots(methods: Sequence[Method]) -> list[Plot]:
    """Make a plot for each kind of record that some run has."""
    accuracy, rmse = partial(rejection, metric="accuracy"), partial(rejection, metric="rmse")
    by_task: list[tuple[str, str, Draw, str]] = [
        ("reliability", "Reliability", reliability, RELIABILITY),
        ("coverage", "Coverage of intervals", coverage, COVERAGE),
        ("confidence", "Confidence", confidence, "The share of test examples by confidence."),
        ("rejection", "Accuracy against rejection", accuracy, REJECTION),
        ("rejection-rmse", "Error against rejection", rmse, REJECTION),
    ]
    made = [_by_task(name, title, draw, methods, note) for name, title, draw, note in by_task]
    return [plot for plot in (*made, entropy(methods)) if plot is not None]


Draw = Callable[[Sequence[Method], str], Plot | None]
"""A function of methods and a task."""


def _by_task(
    name: str, title: str, draw: Draw, methods: Sequence[Method], note: str
) -> Plot | None:
    """Draw a plot for each task, to choose from."""
    options = {
        label: plot for task, label in TASKS.items() if (plot := draw(methods, task)) is not None
    }
    return choices(name, title, "prediction", options, note)


def reliability(methods: Sequence[Method], task: str) -> Plot | None:
    """Plot accuracy against mean confidence, by bin; all seeds together."""
    lines, gaps = [], []
    for method in methods:
        parts = records(method, task, "reliability")
        if parts:
            count, right, confident = (
                _total(part[key] for part in parts) for key in ("count", "right", "confidence")
            )
            bins = [k for k, n in enumerate(count) if n >= MIN_EXAMPLES]
            x, y = [confident[k] / count[k] for k in bins], [right[k] / count[k] for k in bins]
            lines.append(Series(method.name, x, y, style=method.style))
            gap = 100 * (sum(confident) - sum(right)) / sum(count)
            gaps.append(f"{method.name} {gap:+.1f} points")
    if not lines:
        return None
    shown = Figure(
        "reliability",
        "",
        "confidence",
        "accuracy",
        lines,
        percent=True,
        description=f"Mean confidence minus accuracy: {listed(gaps)}.",
    )
    return figure(shown, diagonal=True, x_percent=True)


def coverage(methods: Sequence[Method], task: str) -> Plot | None:
    """Plot how often central intervals of a regression hold the target, against their level."""
    lines, parts_of_text = [], []
    for method in methods:
        parts = records(method, task, "coverage")
        if parts:
            levels = parts[0]["level"]
            means, spreads = mean_and_spread([part["held"] for part in parts])
            lines.append(Series(method.name, levels, means, spreads, method.style))
            held = 100 * (means[_nearest(levels, LEVEL)] or 0)
            parts_of_text.append(
                f"{method.name}'s {100 * LEVEL:.0f} % intervals hold {held:.0f} % of the targets"
            )
    if not lines:
        return None
    shown = Figure(
        "coverage",
        "",
        "level of the interval",
        "targets in it",
        lines,
        percent=True,
        description=f"{listed(parts_of_text)}.",
    )
    return figure(shown, diagonal=True, x_percent=True)


def confidence(methods: Sequence[Method], task: str) -> Plot | None:
    """Plot the share of test examples by confidence, from the first bin that is not empty."""
    counts = [
        (method, _total(part["count"] for part in parts))
        for method in methods
        if (parts := records(method, task, "reliability"))
    ]
    if not counts:
        return None
    begin = min(next((k for k, n in enumerate(count) if n), 0) for _, count in counts)
    lines, highest = [], []
    for method, count in counts:
        names = [f"{100 * (k + 0.5) / len(count):.0f} %" for k in range(len(count))]
        shares = [n / sum(count) for n in count]
        lines.append(Series(method.name, names[begin:], shares[begin:], style=method.style))
        highest.append(f"{method.name} {100 * shares[-1]:.0f} %")
    shown = Figure(
        "confidence",
        "",
        "confidence",
        "test examples",
        lines,
        kind="bars",
        percent=True,
        description=f"Share of predictions in the bin of highest confidence: {listed(highest)}.",
    )
    return figure(shown)


def rejection(methods: Sequence[Method], task: str, metric: str) -> Plot | None:
    """Plot the accuracy (or RMSE) of the other predictions when the least certain are rejected."""
    lines, gains = [], []
    for method in methods:
        parts = [part for part in records(method, task, "rejection") if metric in part]
        if parts:
            rejected = parts[0]["rejected"]
            means, spreads = mean_and_spread([part[metric] for part in parts])
            lines.append(Series(method.name, rejected, means, spreads, method.style))
            value = means[_nearest(rejected, REJECTED_SHARE)]
            gains.append(f"{method.name} goes from {means[0]:.3g} to {value:.3g}")
    if not lines:
        return None
    label = f"{'accuracy' if metric == 'accuracy' else 'RMSE'} of the rest"
    shown = Figure(
        "rejection",
        "",
        "rejected",
        label,
        lines,
        percent=metric == "accuracy",
        description=f"{label[0].upper()}{label[1:]} when a fifth is rejected: {listed(gains)}.",
    )
    return figure(shown, x_percent=True)


def entropy(methods: Sequence[Method]) -> Plot | None:
    """Plot histograms of the predictions' entropy on familiar and on unseen inputs."""
    options = {
        f"{method.name}, {label}": _histograms(parts)
        for method in methods
        for task, label in TASKS.items()
        if (parts := records(method, task, "entropy"))
    }
    title = "Entropy on familiar and on unseen inputs"
    return choices("entropy", title, "method and prediction", options, ENTROPY)


def _histograms(parts: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot the mean histograms of the runs that have the bins of the first run."""
    first = parts[0]
    same = [part for part in parts if part["edges"] == first["edges"]]
    centres = [f"{(a + b) / 2:.2f}" for a, b in itertools.pairwise(first["edges"])]
    bars = [
        Series(name, centres, mean_and_spread([part[key] for part in same])[0], style=style)
        for name, key, style in (
            ("familiar: the clients' own test data", "familiar", FAMILIAR),
            (f"unseen: {first['what']}", "unseen", UNSEEN),
        )
    ]
    auroc = sum(part["auroc"] for part in same) / len(same)
    description = (
        f"Mean entropy {first['familiar_mean']:.2f} nats on familiar data and "
        f"{first['unseen_mean']:.2f} on {first['what']}. The area under the ROC curve of the "
        f"entropy is {auroc:.2f} (0.5: it does not distinguish the two, 1: it always does)."
    )
    shown = Figure(
        "entropy",
        "",
        "entropy, nats",
        "predictions",
        bars,
        kind="bars",
        percent=True,
        description=description,
    )
    return figure(shown, description, touching=True)


def _nearest(values: Sequence[float], value: float) -> int:
    """Return the position of the value that is nearest to this one."""
    return min(range(len(values)), key=lambda k: abs(values[k] - value))


def _total(columns: Iterable[Sequence[float]]) -> list[float]:
    """Return the sum of several lists, position by position."""
    return [sum(values) for values in zip(*columns, strict=True)]
