"""The clients: what they hold, how well each is served before and after personalisation, and who resembles whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhb.report.figures import COLOURS, Figure, Series, Style
from fedhb.report.plots import Plot, choices, figure, heat, points
from fedhb.report.run_data import Method
from fedhb.report.tables import NAMES

LABEL_COLOURS = (*COLOURS, "#3f8f9e", "#b04f6f")
BLOCK = 256
"""Points whose distances to all others are computed at once."""


def label_heat(methods: Sequence[Method]) -> Plot | None:
    """How many training examples of each label every client has. Seeds deal the data anew, so it is that of one seed."""
    run = next(
        (
            m.first
            for m in methods
            if m.first.evaluation and m.first.evaluation["clients"]["labels"]
        ),
        None,
    )
    if run is None:
        return None
    clients = (run.evaluation or {})["clients"]
    labels = np.array(clients["labels"])
    order = sorted(
        range(len(labels)), key=lambda k: (int(labels[k].argmax()), -int(labels[k].max()))
    )
    held = (labels > 0).sum(1)
    few = f"{held.min()} to {held.max()}" if held.min() < held.max() else f"{held.min()}"
    sizes = labels.sum(1)
    held_by = f"A client holds {few} labels and {sizes.min()} to {sizes.max()} examples."
    alt = f"{len(labels)} clients by {labels.shape[1]} labels. {held_by}"
    return heat(
        "labels", f"Labels of each client (seed {run.seed})", [f"label {k}" for k in range(labels.shape[1])],
        [clients["client"][k] for k in order], labels[order].T.tolist(), ("label", "client", "training examples"),
        "Clients are ordered by the label they hold most of.", alt,
    )  # fmt: skip


def before_and_after(methods: Sequence[Method]) -> list[Plot]:
    """Every client's metric under the global prediction and after personalisation: points, and sorted bars per method.

    Methods with another metric, such as a regression's beside classes', have plots of their own.
    """
    by_metric: dict[str, list[tuple[Method, list[tuple[float, float, Any]]]]] = {}
    for method in methods:
        per_client = (method.first.result or {}).get("per_client") or {}
        main = next(
            (key.removeprefix("global_") for key in per_client if key.startswith("global_")), None
        )
        if main is not None:
            before, after = per_client[f"global_{main}"], per_client[f"personalised_{main}"]
            names = per_client.get("client") or list(range(len(before)))
            rows = [
                (b, a, n)
                for b, a, n in zip(before, after, names, strict=True)
                if b is not None and a is not None
            ]
            by_metric.setdefault(main, []).append((method, rows))
    groups = enumerate(by_metric.items(), 1)
    return [
        plot
        for k, (main, group) in groups
        for plot in _clients_by(main, group, "" if k == 1 else f"-{k}")
    ]


def _clients_by(
    main: str, group: Sequence[tuple[Method, list[tuple[float, float, Any]]]], suffix: str
) -> list[Plot]:
    """The plots of one metric; a row is a client's value before, after, and its name."""
    what, high = NAMES.get(main, main).removesuffix(", %"), main == "accuracy"
    groups: list[dict[str, Any]] = []
    bars: dict[str, Plot] = {}
    better = []
    for method, unsorted in group:
        gained = sum((a > b) if high else (a < b) for b, a, _ in unsorted)
        better.append(f"{method.name} serves {gained} of {len(unsorted)} clients better after it")
        groups.append(
            {
                "name": method.name,
                "colour": method.style.colour,
                "mark": method.style.mark,
                "points": [[b, a, str(n)] for b, a, n in unsorted],
            }
        )
        rows = sorted(unsorted, key=lambda row: row[1], reverse=not high)
        worst = rows[0]
        bars[method.name] = figure(
            Figure(
                "bars", method.name, "client", what,
                [
                    Series("global", [n for _, _, n in rows], [b for b, _, _ in rows], style=Style("#8a8f98")),
                    Series("personalised", [n for _, _, n in rows], [a for _, a, _ in rows], style=method.style),
                ],
                kind="bars", percent=high,
                description=f"{method.name}: client {worst[2]} is served worst, {worst[1]:.3g} after personalisation and "
                f"{worst[0]:.3g} before; the median client has {rows[len(rows) // 2][1]:.3g}.",
            ),
        )  # fmt: skip
    scatter = points(
        f"scatter{suffix}", f"Each client's {what}, before and after personalisation",
        (f"global {what}", f"personalised {what}"), groups,
        note=f"A client {'above' if high else 'below'} the diagonal gained by personalisation.", alt=". ".join(better) + ".",
        diagonal=True, percent=high,
    )  # fmt: skip
    sorted_bars = choices(
        f"bars{suffix}", f"Clients by their personalised {what}, worst first", "method", bars
    )
    return [scatter, *([sorted_bars] if sorted_bars else [])]


def client_map(methods: Sequence[Method]) -> Plot | None:
    """The clients' weights after personalisation, on their two main directions, coloured by the label they hold most of."""
    options = {}
    for method in methods:
        evaluation = method.first.evaluation
        if not evaluation or len(evaluation["sketches"]) < 3:
            continue
        place, share = principal(np.array(evaluation["sketches"]))
        clients = evaluation["clients"]
        labels = clients["labels"]
        dominant = [int(np.argmax(row)) for row in labels] if labels else [0] * len(place)
        groups = []
        for label in sorted(set(dominant)):
            mine = [k for k, one in enumerate(dominant) if one == label]
            rows = [[*place[k].tolist(), str(clients["client"][k])] for k in mine]
            name = f"mostly label {label}" if labels else "clients"
            groups.append(
                {
                    "name": name,
                    "colour": LABEL_COLOURS[label % len(LABEL_COLOURS)],
                    "text": str(label) if labels else "",
                    "points": rows,
                }
            )
        near = neighbours(place, dominant) if labels else None
        alt = (
            f"{method.name}: {len(place)} clients on two directions that hold {100 * share:.0f} % of the spread of their weights."
            + (
                f" {100 * near:.0f} % of the clients have a nearest neighbour with the same dominant label."
                if near is not None
                else ""
            )
        )
        options[method.name] = points(
            "map", method.name, ("first direction", "second direction"), groups, alt=alt, note=alt, plain=True,
        )  # fmt: skip
    note = (
        "Each client's weights mᵢ after personalisation, from seeded sketches of 64 numbers. Points close together are clients "
        "whose models resemble each other; the number in a point is the label the client holds most of."
    )
    return choices("map", "Map of the clients", "method", options, note)


def principal(sketches: np.ndarray) -> tuple[np.ndarray, float]:
    """Coordinates on the two main directions [N, 2], scaled to a largest value of 1, and their share of the variance."""
    centred = sketches - sketches.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    place = u[:, :2] * s[:2]
    total = float((s**2).sum())
    return place / max(float(np.abs(place).max()), 1e-30), float(
        (s[:2] ** 2).sum() / total
    ) if total else 0.0


def neighbours(place: np.ndarray, labels: Sequence[int]) -> float:
    """The share of points whose nearest neighbour has the same label."""
    nearest = np.concatenate([_nearest(place, begin) for begin in range(0, len(place), BLOCK)])
    return float(np.mean([labels[k] == labels[int(n)] for k, n in enumerate(nearest)]))


def _nearest(place: np.ndarray, begin: int) -> np.ndarray:
    """The nearest other point of each in a block of them: all distances at once would be gigabytes for 10,000 clients."""
    rows = np.arange(begin, min(begin + BLOCK, len(place)))
    gaps = (place[rows, None, 0] - place[None, :, 0]) ** 2 + (
        place[rows, None, 1] - place[None, :, 1]
    ) ** 2
    gaps[np.arange(len(rows)), rows] = np.inf
    found: np.ndarray = gaps.argmin(1)
    return found
