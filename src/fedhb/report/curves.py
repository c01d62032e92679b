"""Learning curves: loss, accuracy and negative ELBO, by round and by what was sent."""

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
"""By likelihood: what a round's `score` is. The plot's name, its title and the axis."""
NOTES = {
    "loss": "The clients' loss on their own training data while they train.",
    "score": "Of the clients on their own training data while they train: it says how they learn, not how they do.",
    "negative_elbo": "The whole objective, estimated from each round's clients. Comparable within one model only: constants "
    "differ between models.",
}


def plots(methods: Sequence[Method]) -> list[Plot]:
    """One plot for each quantity that some run has recorded; scores of different kinds have a plot each."""
    kinds = {
        m.name: next((run.likelihood for run in m.runs if run.likelihood), "") for m in methods
    }
    loss = _plot(methods, "loss", ("curve-loss", "Loss", "loss"), NOTES["loss"])
    scores = [
        _plot(
            [m for m in methods if kinds[m.name] == kind],
            "score",
            words,
            NOTES["score"],
            percent=kind == "categorical",
        )
        for kind, words in SCORES.items()
    ]
    objective = _plot(
        methods,
        "negative_elbo",
        ("curve-negative_elbo", "Negative ELBO", "negative ELBO"),
        NOTES["negative_elbo"],
    )
    return [plot for plot in (loss, *scores, objective) if plot is not None]


def _plot(
    methods: Sequence[Method],
    key: str,
    words: tuple[str, str, str],
    note: str,
    percent: bool = False,
) -> Plot | None:
    name, title, label = words
    lines = [line for method in methods for line in method_lines(method, key)]
    if not lines:
        return None
    ends = [f"{line.name} ends at {_end(line, percent)}" for line in lines if not line.faint]
    about = Figure(
        name, title, "round", label, lines, percent=percent, log_y=key == "loss" and _wide(lines),
        description=f"{title} by round: {listed(ends)}.",
    )  # fmt: skip
    return figure(about, note, X_CHOICES)


def method_lines(method: Method, key: str) -> list[Series]:
    """A line per run and, for several runs, their mean over those that have recorded a round."""
    runs = [(run, values) for run in method.runs if (values := by_round(run, key))]
    rounds = sorted({k for _, values in runs for k in values})
    kept = [rounds[k] for k in thinned(len(rounds))]
    lines = []
    for run, values in runs:
        own = sorted(values.keys() & {*kept, max(values)})
        x: Any = {"round": own, "sent": [values[k][1] for k in own]}
        name = f"{method.name}, seed {run.seed}" if len(runs) > 1 else method.name
        lines.append(
            Series(name, x, [values[k][0] for k in own], style=method.style, faint=len(runs) > 1)
        )
    if len(runs) > 1:
        means, spreads = mean_and_spread(
            [[values[k][0] if k in values else None for k in kept] for _, values in runs]
        )
        sent = [fmean(values[k][1] for _, values in runs if k in values) for k in kept]
        x = {"round": kept, "sent": sent}
        lines.append(Series(method.name, x, means, spreads, method.style))
    return lines


def by_round(run: RunData, key: str) -> dict[int, tuple[float | None, float]]:
    """What a run has recorded of a quantity in every round, and the megabytes sent until then; empty where there is nothing."""
    sent = accumulate((r.get("down_bytes", 0) + r.get("up_bytes", 0)) / 1e6 for r in run.rounds)
    found = {
        r["round"]: (r.get(key), megabytes) for r, megabytes in zip(run.rounds, sent, strict=True)
    }
    return found if any(value is not None for value, _ in found.values()) else {}


def _end(line: Series, percent: bool) -> str:
    last = next((y for y in reversed(line.y) if y is not None), float("nan"))
    return f"{100 * last:.1f} %" if percent else number(last)


def _wide(lines: Sequence[Series]) -> bool:
    """Whether values spread over more than a factor of thirty, all of them positive."""
    values = [y for line in lines for y in line.y if y is not None]
    return min(values) > 0 and max(values) > 30 * min(values)
