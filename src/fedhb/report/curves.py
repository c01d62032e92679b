"""Learning curves: loss, score and negative ELBO, against rounds or megabytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from fedhb.report.figures import Figure, Series, mean_and_spread
from fedhb.report.plots import Plot, figure, thinned
from fedhb.report.run_data import Method, RunData
from fedhb.report.wording import listed, number

X_CHOICES = {"round": "round", "sent": "sent in all, MB"}
SCORES = {
    "categorical": ("curve-score", "Accuracy", "training accuracy"),
    "gaussian": ("curve-error", "Squared error", "mean squared error"),
    "": ("curve-other", "Score", "score"),
}
"""The plot of a round's `score`, by likelihood: (its name, its title, the label of its axis)."""
NOTES = {
    "loss": "The clients' loss on their own training data while they train.",
    "score": "Measured on the clients' own training data while they train: it shows how training "
    "goes, not how well they predict new data.",
    "negative_elbo": "The whole objective, estimated from each round's clients. Compare it within "
    "one model only: constants differ between models.",
}
MIN_RANGE_OF_LOG = 30
"""An axis is logarithmic if its largest value is more than so many times its smallest value."""


def plots(methods: Sequence[Method]) -> list[Plot]:
    """Make a plot for each quantity that some run has recorded, and for each kind of score."""
    kinds = {
        method.name: next((run.likelihood for run in method.runs if run.likelihood), "")
        for method in methods
    }
    loss = _plot(methods, "loss", ("curve-loss", "Loss", "loss"))
    scores = [
        _plot(
            [method for method in methods if kinds[method.name] == kind],
            "score",
            labels,
            percent=kind == "categorical",
        )
        for kind, labels in SCORES.items()
    ]
    elbo_labels = ("curve-negative_elbo", "Negative ELBO", "negative ELBO")
    objective = _plot(methods, "negative_elbo", elbo_labels)
    return [plot for plot in (loss, *scores, objective) if plot is not None]


def _plot(
    methods: Sequence[Method], key: str, labels: tuple[str, str, str], percent: bool = False
) -> Plot | None:
    name, title, y_label = labels
    lines = [line for method in methods for line in method_lines(method, key)]
    if not lines:
        return None
    ends = [f"{line.name} ends at {_end(line, percent)}" for line in lines if not line.faint]
    shown = Figure(
        name,
        title,
        "round",
        y_label,
        lines,
        percent=percent,
        log_y=key == "loss" and _needs_log(lines),
        description=f"{title} by round: {listed(ends)}.",
    )
    return figure(shown, NOTES[key], X_CHOICES)


def method_lines(method: Method, key: str) -> list[Series]:
    """Make a line per run and, for several runs, their mean.

    The mean of a round is over the runs that have recorded it.
    """
    runs = [(run, values) for run in method.runs if (values := by_round(run, key))]
    rounds = sorted({k for _, values in runs for k in values})
    shown = [rounds[k] for k in thinned(len(rounds))]
    lines = []
    for run, values in runs:
        run_rounds = sorted(values.keys() & {*shown, max(values)})
        x: Any = {"round": run_rounds, "sent": [values[k][1] for k in run_rounds]}
        y = [values[k][0] for k in run_rounds]
        name = f"{method.name}, seed {run.seed}" if len(runs) > 1 else method.name
        lines.append(Series(name, x, y, style=method.style, faint=len(runs) > 1))
    if len(runs) > 1:
        means, spreads = mean_and_spread(
            [[values[k][0] if k in values else None for k in shown] for _, values in runs]
        )
        sent = [fmean(values[k][1] for _, values in runs if k in values) for k in shown]
        x = {"round": shown, "sent": sent}
        lines.append(Series(method.name, x, means, spreads, method.style))
    return lines


def by_round(run: RunData, key: str) -> dict[int, tuple[float | None, float]]:
    """Return (the value of a quantity, the megabytes sent until then) for every round of a run.

    The result is empty if the run has not recorded the quantity.
    """
    sent = accumulate((r.get("down_bytes", 0) + r.get("up_bytes", 0)) / 1e6 for r in run.rounds)
    values = {
        r["round"]: (r.get(key), megabytes) for r, megabytes in zip(run.rounds, sent, strict=True)
    }
    return values if any(value is not None for value, _ in values.values()) else {}


def _end(line: Series, percent: bool) -> str:
    last = next((y for y in reversed(line.y) if y is not None), float("nan"))
    return f"{100 * last:.1f} %" if percent else number(last)


def _needs_log(lines: Sequence[Series]) -> bool:
    values = [y for line in lines for y in line.y if y is not None]
    return min(values) > 0 and max(values) > MIN_RANGE_OF_LOG * min(values)
