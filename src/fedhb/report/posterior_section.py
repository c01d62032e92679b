"""The posterior: where clients differ by layer (NIW), and which clients share a prototype (Mixture)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedhb.report.figures import COLOURS, Figure, Series, Style, mean_and_spread
from fedhb.report.plots import Plot, choices, figure, heat, thinned
from fedhb.report.run_data import Method
from fedhb.report.wording import listed

SPREAD = Style("#8a8f98")
EQUAL = 0.01
"""Responsibilities that differ by less are equal."""


def plots(methods: Sequence[Method]) -> list[Plot]:
    """What the evaluations of NIW, of mixtures and of other methods with several networks hold."""
    found = [
        shared_prototypes(methods),
        prototype_use(methods),
        prototype_skill(methods),
        networks(methods),
    ]
    found.insert(
        0 if any(method.first.algorithm == "niw" for method in methods) else len(found),
        layers(methods),
    )
    return [plot for plot in found if plot is not None]


def layers(methods: Sequence[Method]) -> Plot | None:
    """How far clients' weights differ, by tensor: the prior that NIW has learned, and how they really spread."""
    options: dict[str, Plot] = {}
    for method in methods:
        evaluation = method.first.evaluation
        own: dict[str, Any] = (evaluation or {}).get("posterior") or {}
        if not evaluation or not own.get("spread"):
            continue
        names = [layer["name"] for layer in evaluation["network"]["layers"]]
        spreads = [((run.evaluation or {}).get("posterior") or {}) for run in method.runs]
        spread = mean_and_spread([one["spread"] for one in spreads if one.get("spread")])[0]
        bars = []
        if own.get("prior_deviation"):
            prior = mean_and_spread(
                [one["prior_deviation"] for one in spreads if one.get("prior_deviation")]
            )[0]
            bars.append(
                Series(
                    "under the posterior: √(V₀ / n₀)",
                    names[: len(prior)],
                    prior,
                    style=method.style,
                )
            )
        bars.append(
            Series("of the personalised clients", names[: len(spread)], spread, style=SPREAD)
        )
        most = max(range(len(bars[0].y)), key=lambda k: bars[0].y[k] or 0.0)
        whose = (
            "under the posterior, clients"
            if own.get("prior_deviation")
            else "the personalised clients"
        )
        about = f"{method.name}: {whose} differ most in {names[most]}, by {bars[0].y[most]:.3g} a weight."
        shown = Figure(
            "layers",
            "",
            "tensor",
            "standard deviation of a weight",
            bars,
            kind="bars",
            log_y=len(bars) > 1,
            description=about,
        )
        options[method.name] = figure(shown, about)
    order = sorted(options, key=lambda name: "√(V₀" not in str(options[name]["series"][0]["name"]))
    note = "Where do clients differ? The standard deviation of a weight between clients, for every tensor of the network."
    return choices(
        "layers",
        "Differences between clients, by layer",
        "method",
        {name: options[name] for name in order},
        note,
    )


def _mixtures(
    methods: Sequence[Method], key: str
) -> list[tuple[Method, dict[str, Any], dict[str, Any]]]:
    found = []
    for method in methods:
        evaluation = method.first.evaluation
        own = (evaluation or {}).get("posterior") or {}
        if evaluation and own.get(key):
            found.append((method, evaluation, own))
    return found


def shared_prototypes(methods: Sequence[Method]) -> Plot | None:
    """c(j|i) of every client and the gate's share on its test examples: two heat maps to choose from."""
    options = {}
    for method, evaluation, own in _mixtures(methods, "responsibilities"):
        c, gate, names = own["responsibilities"], own["gate"], evaluation["clients"]["client"]
        K = len(c[0])
        order = sorted(range(len(c)), key=lambda k: (c[k].index(max(c[k])), -max(c[k])))
        nearest = [row.index(max(row)) for row in c]
        sizes = [f"{nearest.count(j)} to prototype {j}" for j in range(K)]
        about = f"{len(c)} clients by {K} prototypes: {listed(sizes)} are nearest."
        if K > 1 and max(abs(value - 1 / K) for row in c for value in row) < EQUAL:
            about = f"No client is nearer to one of the {K} prototypes than to another: they have become the same."
        for label, values, note in (
            (
                "responsibilities c(j|i)",
                c,
                "How near each client's weights are to each prototype, as the E-step sees it.",
            ),
            (
                "gate gⱼ(x)",
                gate,
                "Which prototype the gate chooses for each client's test examples, on average.",
            ),
        ):
            options[f"{method.name}, {label}"] = heat(
                "prototypes", label, [f"prototype {j}" for j in range(K)], [names[k] for k in order],
                [[values[k][j] for k in order] for j in range(K)], ("prototype", "client", "share"), f"{note} {about}",
                about, most=1,
            )  # fmt: skip
    return choices(
        "prototypes",
        "Who shares a prototype?",
        "what",
        options,
        "Clients are ordered by the prototype they are nearest to.",
    )


def prototype_use(methods: Sequence[Method]) -> Plot | None:
    """The prototypes' mean responsibilities over the rounds."""
    options = {}
    for method in methods:
        rounds = [r for r in method.first.rounds if r.get("responsibilities")]
        if not rounds:
            continue
        kept, K = thinned(len(rounds), 320), len(rounds[0]["responsibilities"])
        x = [rounds[k]["round"] for k in kept]
        lines = [
            Series(
                f"prototype {j}",
                x,
                [rounds[k]["responsibilities"][j] for k in kept],
                style=Style(COLOURS[j % len(COLOURS)]),
            )
            for j in range(K)
        ]
        last = rounds[-1]
        about = f"{method.name}: {last['effective_prototypes']:.2f} effective prototypes of {K} in the last round."
        shown = Figure(
            "use", "", "round", "share of the clients", lines, percent=True, description=about
        )
        options[method.name] = figure(shown, about)
    return choices("use", "Use of the prototypes while training", "method", options)


def prototype_skill(methods: Sequence[Method]) -> Plot | None:
    """The accuracy of each prototype alone and the gate's share, by class; and how far apart prototypes are."""
    options = {}
    for method, _, own in _mixtures(methods, "prototype_accuracy"):
        accuracy, gate = own["prototype_accuracy"], own["gate_by_class"]
        K, classes = len(accuracy), len(accuracy[0])
        apart = [own["distances"][i][j] for i in range(K) for j in range(i)]
        far = (
            f"Distances between prototypes: {min(apart):.3g} to {max(apart):.3g}."
            if apart
            else "There is one prototype."
        )
        for label, values in (("accuracy of each alone", accuracy), ("the gate's share", gate)):
            options[f"{method.name}, {label}"] = heat(
                "skill", label, [f"prototype {j}" for j in range(K)], [str(k) for k in range(classes)], values,
                ("prototype", "label", "share"), far, f"{K} prototypes by {classes} labels. {far}", most=1,
            )  # fmt: skip
    return choices("skill", "What is each prototype good at?", "what", options)


def networks(methods: Sequence[Method]) -> Plot | None:
    """The weights of several networks in each client's personal model, for methods that keep some."""
    options = {}
    for method in methods:
        evaluation = method.first.evaluation
        if evaluation and evaluation.get("shares"):
            shares, names = evaluation["shares"], evaluation["clients"]["client"]
            order = sorted(
                range(len(shares)), key=lambda k: (shares[k].index(max(shares[k])), -max(shares[k]))
            )
            options[method.name] = heat(
                "networks", method.name, [f"network {j}" for j in range(len(shares[0]))], [names[k] for k in order],
                [[shares[k][j] for k in order] for j in range(len(shares[0]))], ("network", "client", "weight"), "",
                f"The weights of {len(shares[0])} networks in the personal models of {len(shares)} clients.", most=1,
            )  # fmt: skip
    return choices("networks", "Networks in each client's personal model", "method", options)
