"""The posterior: differences between clients by layer, and the prototypes that clients share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedhb.report.figures import COLOURS, GREY, Figure, Series, Style, mean_and_spread
from fedhb.report.plots import Plot, by_largest, choices, figure, heat, thinned
from fedhb.report.run_data import Method, RunData
from fedhb.report.wording import listed

TOLERANCE = 0.01
"""Responsibilities that differ by less count as equal."""


def plots(methods: Sequence[Method]) -> list[Plot]:
    """Make all plots of the posteriors that the evaluations describe."""
    by_client = [
        shared_prototypes(methods),
        prototype_use(methods),
        prototype_skill(methods),
        networks(methods),
    ]
    # The differences by layer come first where a method has learned them.
    learned = any(_posterior(method.first).get("prior_deviation") for method in methods)
    by_layer = [layers(methods)]
    ordered = [*by_layer, *by_client] if learned else [*by_client, *by_layer]
    return [plot for plot in ordered if plot is not None]


def _posterior(run: RunData) -> dict[str, Any]:
    """Return the evaluation's description of the posterior; empty if there is none."""
    return (run.evaluation or {}).get("posterior") or {}


def layers(methods: Sequence[Method]) -> Plot | None:
    """Plot how far clients' weights differ, for every tensor of the network.

    The bars are the deviation of the learned prior, for methods that have one, and the deviation of
    the personalised clients.
    """
    learned: dict[str, Plot] = {}
    measured: dict[str, Plot] = {}
    for method in methods:
        evaluation, posterior = method.first.evaluation, _posterior(method.first)
        if not evaluation or not posterior.get("spread"):
            continue
        names = [layer["name"] for layer in evaluation["network"]["layers"]]
        spread = _mean_of_runs(method, "spread")
        bars = [Series("of the personalised clients", names[: len(spread)], spread, style=GREY)]
        clients = "the personalised clients"
        if posterior.get("prior_deviation"):
            prior = _mean_of_runs(method, "prior_deviation")
            label = "under the posterior"
            bars.insert(0, Series(label, names[: len(prior)], prior, style=method.style))
            clients = "under the posterior, clients"
        values = [value or 0.0 for value in bars[0].y]
        largest = max(values)
        description = (
            f"{method.name}: {clients} differ most in {names[values.index(largest)]}: the standard "
            f"deviation of a weight is {largest:.3g}."
        )
        shown = Figure(
            "layers",
            "",
            "tensor",
            "standard deviation of a weight",
            bars,
            kind="bars",
            log_y=len(bars) > 1,
            description=description,
        )
        options = learned if posterior.get("prior_deviation") else measured
        options[method.name] = figure(shown, description)
    note = (
        "Where do clients differ? The standard deviation of a weight between clients, for every "
        "tensor of the network."
    )
    title = "Differences between clients, by layer"
    return choices("layers", title, "method", learned | measured, note)


def _mean_of_runs(method: Method, key: str) -> list[float | None]:
    """Average a list of numbers of the posterior over the runs that have it."""
    rows = [rows for run in method.runs if (rows := _posterior(run).get(key))]
    return mean_and_spread(rows)[0]


def shared_prototypes(methods: Sequence[Method]) -> Plot | None:
    """Plot c(j|i) of every client, and the gate's mean output on its test examples."""
    options = {}
    for method in methods:
        evaluation, posterior = method.first.evaluation, _posterior(method.first)
        if not evaluation or not posterior.get("responsibilities"):
            continue
        c, names = posterior["responsibilities"], evaluation["clients"]["client"]
        K = len(c[0])
        nearest = [row.index(max(row)) for row in c]
        sizes = [f"{nearest.count(j)} to prototype {j}" for j in range(K)]
        description = (
            f"{len(c)} clients by {K} prototypes. Clients nearest to each: {listed(sizes)}."
        )
        if K > 1 and max(abs(value - 1 / K) for row in c for value in row) < TOLERANCE:
            description = (
                f"No client is nearer to one of the {K} prototypes than to another: the prototypes "
                "have become the same."
            )
        for label, rows, note in (
            (
                "responsibilities c(j|i)",
                c,
                "How near each client's weights are to each prototype, in the E-step.",
            ),
            (
                "gate gⱼ(x)",
                posterior["gate"],
                "The gate's mean share of each prototype on each client's test examples.",
            ),
        ):
            options[f"{method.name}, {label}"] = _client_heat(
                ("prototypes", label, "prototype", "share"),
                names,
                rows,
                by_largest(c),
                note=f"{note} {description}",
                alt=description,
            )
    return choices(
        "prototypes",
        "Who shares a prototype?",
        "values",
        options,
        "Clients are sorted by the prototype they are nearest to.",
    )


def _client_heat(
    labels: tuple[str, str, str, str],
    clients: Sequence[Any],
    rows: Sequence[Sequence[float]],
    order: Sequence[int],
    **options: Any,
) -> Plot:
    """Make a heat map of a share for every client and component, such as a prototype.

    Args:
        labels: (name of the plot, title, word for a component, word for a share).
        clients: the names of the clients [N].
        rows: the shares of each client [N, K].
        order: the order in which clients are shown.
        options: more entries of the plot.
    """
    name, title, component, value = labels
    K = len(rows[0])
    return heat(
        name,
        title,
        [f"{component} {j}" for j in range(K)],
        [clients[k] for k in order],
        [[rows[k][j] for k in order] for j in range(K)],
        (component, "client", value),
        **options,
        most=1,
    )


def prototype_use(methods: Sequence[Method]) -> Plot | None:
    """Plot the prototypes' mean responsibilities against the rounds."""
    options = {}
    for method in methods:
        rounds = [r for r in method.first.rounds if r.get("responsibilities")]
        if not rounds:
            continue
        shown_rounds = [rounds[k] for k in thinned(len(rounds), 320)]
        K = len(rounds[0]["responsibilities"])
        x = [r["round"] for r in shown_rounds]
        lines = [
            Series(
                f"prototype {j}",
                x,
                [r["responsibilities"][j] for r in shown_rounds],
                style=Style(COLOURS[j % len(COLOURS)]),
            )
            for j in range(K)
        ]
        description = (
            f"{method.name}: {rounds[-1]['effective_prototypes']:.2f} effective prototypes of {K} "
            "in the last round."
        )
        shown = Figure(
            "use", "", "round", "share of the clients", lines, percent=True, description=description
        )
        options[method.name] = figure(shown, description)
    return choices("use", "Use of the prototypes while training", "method", options)


def prototype_skill(methods: Sequence[Method]) -> Plot | None:
    """Plot the accuracy of each prototype alone, and the gate's share, by class."""
    options = {}
    for method in methods:
        posterior = _posterior(method.first)
        if not posterior.get("prototype_accuracy"):
            continue
        accuracy, gate = posterior["prototype_accuracy"], posterior["gate_by_class"]
        K, classes = len(accuracy), len(accuracy[0])
        distances = [posterior["distances"][i][j] for i in range(K) for j in range(i)]
        note = "There is one prototype."
        if distances:
            note = f"Distances between prototypes: {min(distances):.3g} to {max(distances):.3g}."
        for label, rows in (("accuracy of each alone", accuracy), ("the gate's share", gate)):
            options[f"{method.name}, {label}"] = heat(
                "skill",
                label,
                [f"prototype {j}" for j in range(K)],
                [str(k) for k in range(classes)],
                rows,
                ("prototype", "label", "share"),
                note=note,
                alt=f"{K} prototypes by {classes} labels. {note}",
                most=1,
            )
    return choices("skill", "Which labels does each prototype predict well?", "values", options)


def networks(methods: Sequence[Method]) -> Plot | None:
    """Plot the weights of several networks in each client's personal model, if there are any."""
    options = {}
    for method in methods:
        evaluation = method.first.evaluation
        if evaluation and evaluation.get("shares"):
            shares, names = evaluation["shares"], evaluation["clients"]["client"]
            options[method.name] = _client_heat(
                ("networks", method.name, "network", "weight"),
                names,
                shares,
                by_largest(shares),
                alt=f"The weights of {len(shares[0])} networks in the personal models of "
                f"{len(shares)} clients.",
            )
    return choices("networks", "Networks in each client's personal model", "method", options)
