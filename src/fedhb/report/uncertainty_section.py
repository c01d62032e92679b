"""Uncertainty: reliability, confidence, rejection, and entropy on familiar and on unseen inputs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedhb.report.figures import Figure, Series, Style, mean_and_spread
from fedhb.report.plots import Plot, choices, figure
from fedhb.report.run_data import Method
from fedhb.report.tables import TASKS
from fedhb.report.wording import listed

UNSEEN = Style("#d55e00")
FAMILIAR = Style("#0072b2")
REJECTION = "The least certain predictions are rejected first: a model that knows what it does not know gains quickly."


def records(method: Method, task: str, kind: str) -> list[dict[str, Any]]:
    """What the runs of a method have recorded of a kind: reliability, coverage, rejection or entropy."""
    found = [
        ((run.evaluation or {}).get("uncertainty") or {}).get(task) or {} for run in method.runs
    ]
    return [one[kind] for one in found if kind in one]


def plots(methods: Sequence[Method]) -> list[Plot]:
    """All that the runs have recorded."""
    found = [
        _by_task("reliability", "Reliability", reliability, methods, "On the diagonal predictions are as right as they are sure; "
                 "below it they are too sure. Bins of confidence with at least ten examples."),
        _by_task("coverage", "Coverage of intervals", coverage, methods, "On the diagonal, intervals hold what they say."),
        _by_task("confidence", "Confidence", confidence, methods, "The share of test examples by confidence."),
        _by_task("rejection", "Accuracy against rejection", partial(rejection, what="accuracy"), methods, REJECTION),
        _by_task("rejection-rmse", "Error against rejection", partial(rejection, what="rmse"), methods, REJECTION),
        entropy(methods),
    ]  # fmt: skip
    return [plot for plot in found if plot is not None]


def _by_task(name: str, title: str, draw: Any, methods: Sequence[Method], note: str) -> Plot | None:
    options = {
        label: plot for task, label in TASKS.items() if (plot := draw(methods, task)) is not None
    }
    return choices(name, title, "prediction", options, note)


def reliability(methods: Sequence[Method], task: str) -> Plot | None:
    """Accuracy against mean confidence, by bin; the counts of all seeds together."""
    lines, gaps = [], []
    for method in methods:
        parts = records(method, task, "reliability")
        if parts:
            count, right, confident = (
                _total(part[key] for part in parts) for key in ("count", "right", "confidence")
            )
            kept = [k for k, n in enumerate(count) if n >= 10]
            x, y = [confident[k] / count[k] for k in kept], [right[k] / count[k] for k in kept]
            lines.append(Series(method.name, x, y, style=method.style))
            over = (sum(confident) - sum(right)) / sum(count)
            gaps.append(
                f"{method.name} is {abs(100 * over):.1f} points too {'sure' if over > 0 else 'unsure'}"
            )
    shown = Figure(
        "reliability",
        "",
        "confidence",
        "accuracy",
        lines,
        percent=True,
        description=f"On average {listed(gaps)}.",
    )
    return figure(shown, diagonal=True, x_percent=True) if lines else None


def coverage(methods: Sequence[Method], task: str) -> Plot | None:
    """Regression: how often central intervals hold the target, against their level."""
    lines = []
    for method in methods:
        parts = records(method, task, "coverage")
        if parts:
            means, spreads = mean_and_spread([part["held"] for part in parts])
            lines.append(Series(method.name, parts[0]["level"], means, spreads, method.style))
    ends = [
        f"{line.name}'s 90 % intervals hold {100 * (line.y[17] or 0):.0f} % of the targets"
        for line in lines
    ]
    shown = Figure(
        "coverage",
        "",
        "level of the interval",
        "targets in it",
        lines,
        percent=True,
        description=listed(ends) + ".",
    )
    return figure(shown, diagonal=True, x_percent=True) if lines else None


def confidence(methods: Sequence[Method], task: str) -> Plot | None:
    """The share of test examples by confidence."""
    groups, sure = [], []
    names: list[str] = []
    for method in methods:
        parts = records(method, task, "reliability")
        if parts:
            count = _total(part["count"] for part in parts)
            first = next((k for k, n in enumerate(count) if n), 0)
            names = [f"{100 * (k + 0.5) / len(count):.0f} %" for k in range(len(count))]
            groups.append(
                (
                    first,
                    Series(method.name, names, [n / sum(count) for n in count], style=method.style),
                )
            )
            sure.append(f"{method.name} {100 * count[-1] / sum(count):.0f} %")
    if not groups:
        return None
    begin = min(first for first, _ in groups)
    lines = [Series(s.name, names[begin:], list(s.y)[begin:], style=s.style) for _, s in groups]
    about = f"Share of predictions in the surest bin: {listed(sure)}."
    return figure(
        Figure(
            "confidence",
            "",
            "confidence",
            "test examples",
            lines,
            kind="bars",
            percent=True,
            description=about,
        )
    )


def rejection(methods: Sequence[Method], task: str, what: str) -> Plot | None:
    """Accuracy (or RMSE) of what is left when the least certain share is rejected."""
    lines, gains = [], []
    for method in methods:
        parts = [part for part in records(method, task, "rejection") if what in part]
        if parts:
            means, spreads = mean_and_spread([part[what] for part in parts])
            lines.append(Series(method.name, parts[0]["rejected"], means, spreads, method.style))
            gains.append(f"{method.name} goes from {means[0]:.3g} to {means[8]:.3g}")
    label = f"{'accuracy' if what == 'accuracy' else 'RMSE'} of the rest"
    about = f"{label[0].upper()}{label[1:]} when a fifth is rejected: {listed(gains)}."
    shown = Figure(
        "rejection", "", "rejected", label, lines, percent=what == "accuracy", description=about
    )
    return figure(shown, x_percent=True) if lines else None


def entropy(methods: Sequence[Method]) -> Plot | None:
    """Histograms of the predictions' entropy on familiar and on unseen inputs."""
    options: dict[str, Plot] = {}
    for method in methods:
        for task, label in TASKS.items():
            parts = records(method, task, "entropy")
            if parts:
                options[f"{method.name}, {label}"] = _histograms(parts)
    note = "Predictions for inputs unlike the data should be less certain: their entropy should lie further to the right."
    return choices(
        "entropy",
        "Entropy on familiar and on unseen inputs",
        "method and prediction",
        options,
        note,
    )


def _histograms(parts: Sequence[Mapping[str, Any]]) -> Plot:
    first = parts[0]
    same = [part for part in parts if part["edges"] == first["edges"]]
    edges = first["edges"]
    centres = [f"{(a + b) / 2:.2f}" for a, b in itertools.pairwise(edges)]
    bars = [
        Series(name, centres, mean_and_spread([part[key] for part in same])[0], style=style)
        for name, key, style in (
            ("familiar: the clients' own test data", "familiar", FAMILIAR),
            (f"unseen: {first['what']}", "unseen", UNSEEN),
        )
    ]
    score = sum(part["auroc"] for part in same) / len(same)
    about = (
        f"Mean entropy {first['familiar_mean']:.2f} nats on familiar data and {first['unseen_mean']:.2f} on {first['what']}; "
        f"entropy tells the two apart with an area under the ROC curve of {score:.2f} (0.5: not at all, 1: always)."
    )
    shown = Figure(
        "entropy",
        "",
        "entropy, nats",
        "predictions",
        bars,
        kind="bars",
        percent=True,
        description=about,
    )
    return figure(shown, about, touching=True)


def _total(columns: Any) -> list[float]:
    """The sum of several lists, position by position."""
    return [sum(values) for values in zip(*columns, strict=True)]
