"""Learning curves: loss, accuracy and negative ELBO, by round and by what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from fedhb.figures import Figure, Series, mean_and_spread
from fedhb.report.collect import Method, RunData
from fedhb.report.plots import Plot, figure, thinned
from fedhb.report.words import listed, number

X_CHOICES = {"round": "round", "sent": "sent in all, MB"}


def plots(methods: Sequence[Method]) -> list[Plot]:
    """One plot for each quantity that some run has recorded."""
    classes = any(run.result and "accuracy" in (run.result.get("global") or {}) for m in methods for run in m.runs)
    score = ("Accuracy", "training accuracy") if classes else ("Squared error", "mean squared error")
    shown = (
        ("loss", "Loss", "loss", "The clients' loss on their own training data while they train."),
        ("score", *score, "Of the clients on their own training data while they train: it says how they learn, not how they do."),
        ("negative_elbo", "Negative ELBO", "negative ELBO", "The whole objective, estimated from each round's clients. "
         "Comparable within one model only: constants differ between models."),
    )  # fmt: skip
    found = []
    for key, title, label, note in shown:
        lines = [line for method in methods for line in method_lines(method, key)]
        if not lines:
            continue
        percent = key == "score" and classes
        ends = [f"{line.name} ends at {_end(line, percent)}" for line in lines if not line.faint]
        about = Figure(
            f"curve-{key}", title, "round", label, lines, percent=percent, log_y=key == "loss" and _wide(lines),
            description=f"{title} by round: {listed(ends)}.",
        )  # fmt: skip
        found.append(figure(about, note, X_CHOICES))
    return found


def method_lines(method: Method, key: str) -> list[Series]:
    """A line per run and, for several runs, their mean."""
    lines = [line for run in method.runs if (line := run_line(method, run, key)) is not None]
    if len(lines) < 2:
        return [replace(line, name=method.name) for line in lines]
    means, spreads = mean_and_spread([list(line.y) for line in lines])
    longest = max(lines, key=lambda line: len(line.y))
    mean = Series(method.name, longest.x, means, spreads, method.style)
    return [
        *(
            replace(line, faint=True, name=f"{method.name}, seed {run.seed}")
            for line, run in zip(lines, method.runs, strict=False)
        ),
        mean,
    ]


def run_line(method: Method, run: RunData, key: str) -> Series | None:
    """A run's curve; None where it has none."""
    if not run.rounds or all(record.get(key) is None for record in run.rounds):
        return None
    sent = list(accumulate((r["down_bytes"] + r["up_bytes"]) / 1e6 for r in run.rounds))
    kept = thinned(len(run.rounds))
    x: Any = {"round": [run.rounds[k]["round"] for k in kept], "sent": [sent[k] for k in kept]}
    return Series(method.name, x, [run.rounds[k].get(key) for k in kept], style=method.style)


def _end(line: Series, percent: bool) -> str:
    last = next((y for y in reversed(line.y) if y is not None), float("nan"))
    return f"{100 * last:.1f} %" if percent else number(last)


def _wide(lines: Sequence[Series]) -> bool:
    """Whether values spread over more than a factor of thirty, all of them positive."""
    values = [y for line in lines for y in line.y if y is not None]
    return min(values) > 0 and max(values) > 30 * min(values)
