"""The figures of experiments as plain data: one function for each kind, from the records that its tables are made from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedhb.report.figures import (
    COLOURS,
    DASHES,
    MARKS,
    Figure,
    Series,
    Style,
    mean_and_spread,
    styles,
)

Record = Mapping[str, Any]
PARAMETER = re.compile(r"(.+) (\w+)=(\S+)")
ENOUGH = 3
"""Values of a parameter that make a figure over it."""
DECADE = 10.0
"""From the least to the largest of a curve's values: below it a logarithmic axis would have hardly a number on it."""
TASKS = {"global": "global prediction", "personalised": "personalisation"}


def of(records: Sequence[Record], cell: str, variant: str) -> list[Mapping[str, Any]]:
    """The results of a cell and variant that are valid and did not diverge."""
    mine = [
        r
        for r in records
        if (r["key"]["cell"], r["key"]["variant"]) == (cell, variant) and not r.get("stale")
    ]
    return [r["result"] for r in mine if "diverged" not in r["result"]]


def file_name(*parts: str) -> str:
    """A name for a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(parts)).strip("-").lower()


def numbered(names: Sequence[str]) -> dict[str, Style]:
    """A style for each of names that are no methods."""
    return {
        name: Style(COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % 3], MARKS[k % 4])
        for k, name in enumerate(names)
    }


def curves(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind convergence (fig:mnist_convergence, fig:cifar_dynamics): negative ELBO and loss by round, a line for each cell."""
    found = []
    for variant in settings["variants"]:
        for key, label in (
            ("negative_elbo", "negative ELBO"),
            ("loss", "loss of the clients while they train"),
        ):
            look = numbered(list(settings["cells"]))
            lines = []
            for cell in settings["cells"]:
                rows = [
                    r[key] for r in of(records, cell, variant) if r.get(key) and None not in r[key]
                ]
                if rows:
                    means, spreads = mean_and_spread(rows)
                    lines.append(
                        Series(cell, list(range(1, len(means) + 1)), means, spreads, look[cell])
                    )
            if lines:
                ends = "; ".join(f"{line.name} ends at {line.y[-1]:.4g}" for line in lines)
                values = [y or 0.0 for line in lines for y in line.y]
                title = (
                    f"{variant}: {label} by round"
                    if len(lines) > 1
                    else f"{variant}, {lines[0].name}"
                )
                found.append(
                    Figure(
                        file_name(variant, key), title, "round", label, lines, description=ends,
                        log_y=0 < DECADE * min(values) < max(values),
                    )
                )  # fmt: skip
    return found


def by_epoch(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind convergence with `epochs` (fig:cifar_dynamics, right): accuracy and NLL of clients while they personalise."""
    epochs, found = list(settings.get("epochs", ())), []
    look = styles(list(settings["variants"]))
    for cell in settings["cells"] if epochs else ():
        for metric, label in (("accuracy", "accuracy"), ("nll", "negative log-likelihood")):
            lines = []
            for variant in settings["variants"]:
                done = [
                    r
                    for r in of(records, cell, variant)
                    if {str(n) for n in epochs} <= set(r.get("after", ()))
                ]
                if done and metric in done[0]["global"]:
                    rows = [
                        [r["global"][metric], *(r["after"][str(n)][metric] for n in epochs)]
                        for r in done
                    ]
                    means, spreads = mean_and_spread(rows)
                    lines.append(Series(variant, [0, *epochs], means, spreads, look[variant]))
            if lines:
                gains = ", ".join(
                    f"{line.name} from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines
                )
                found.append(
                    Figure(
                        file_name(cell, "personalisation", metric), f"{cell}: while clients personalise",
                        "epochs of personalisation", label, lines, percent=metric == "accuracy", description=f"{gains}.",
                    )
                )  # fmt: skip
    return found


def parameters(
    settings: Mapping[str, Any], printed: Sequence[Record], records: Sequence[Record]
) -> list[Figure]:
    """Kind table, where variants differ in one parameter (fig:abl_hparam, fig:ens_baseline): accuracy against it."""
    split = {
        name: match.groups()
        for name in settings["variants"]
        if (match := PARAMETER.fullmatch(name))
    }
    names = [parameter for _, parameter, _ in split.values()]
    parameter = max(set(names), key=names.count) if names else ""
    values = list(dict.fromkeys(value for _, name, value in split.values() if name == parameter))
    if len(values) < ENOUGH:
        return []
    methods = list(dict.fromkeys(method for method, name, _ in split.values() if name == parameter))
    plain = [
        name for name in settings["variants"] if name not in split
    ]  # a level to compare with, whatever the parameter
    look = styles([*methods, *plain])
    found = []
    for cell in settings["cells"]:
        for task, label in TASKS.items():
            lines = []
            for method in [*methods, *plain]:
                variants = [
                    method if method in plain else f"{method} {parameter}={value}"
                    for value in values
                ]
                rows = [
                    [
                        r[task]["accuracy"]
                        for r in of(records, cell, one)
                        if "accuracy" in (r.get(task) or {})
                    ]
                    for one in variants
                ]
                ours = [mean_and_spread([[value] for value in row]) for row in rows]
                y, spread = (
                    [m[0] if m else None for m, _ in ours],
                    [s[0] if s else None for _, s in ours],
                )
                if any(value is not None for value in y):
                    lines.append(Series(method, values, y, spread, look[method]))
                theirs = [_printed(printed, cell, one, task) for one in variants]
                if any(value is not None for value in theirs):
                    style = Style(look[method].colour, "dotted", look[method].mark)
                    lines.append(Series(f"{method}, printed", values, theirs, style=style))
            best = [
                f"{one.name} {100 * max(y for y in one.y if y is not None):.2f} %" for one in lines
            ]
            found.append(
                Figure(
                    file_name(cell, task), f"{cell}: {label} against {parameter}", parameter, "accuracy", lines, percent=True,
                    description=f"Best accuracies: {', '.join(best)}.",
                )
            )  # fmt: skip
    return found


def _printed(printed: Sequence[Record], cell: str, variant: str, task: str) -> float | None:
    wanted = (cell, variant, task, "accuracy")
    rows = [
        row
        for row in printed
        if (row["cell"], row["algorithm"], row["task"], row["metric"]) == wanted
    ]
    return rows[0]["mean"] / 100 if rows and isinstance(rows[0]["mean"], float) else None


def few_examples(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind novel: accuracy and NLL of novel clients against the examples they personalise with, a line for each variant."""
    numbers, look, found = (
        [str(n) for n in settings["examples"]],
        styles(list(settings["variants"])),
        [],
    )
    for cell in settings["cells"]:
        for metric, label in (("accuracy", "accuracy"), ("nll", "negative log-likelihood")):
            lines = []
            for variant in settings["variants"]:
                done = [
                    r for r in of(records, cell, variant) if set(numbers) <= set(r.get("after", ()))
                ]
                if done and metric in done[0]["before"]:
                    means, spreads = mean_and_spread(
                        [
                            [r["before"][metric], *(r["after"][n][metric] for n in numbers)]
                            for r in done
                        ]
                    )
                    lines.append(Series(variant, ["none", *numbers], means, spreads, look[variant]))
            ends = ", ".join(f"{line.name} {line.y[-1]:.3g}" for line in lines)
            found.append(
                Figure(
                    file_name(cell, metric), f"{cell}: {label} of novel clients", "examples of its own", label, lines,
                    percent=metric == "accuracy", log_y=metric == "nll", description=f"With {numbers[-1]} examples: {ends}.",
                )
            )  # fmt: skip
    return found


def gaps(settings: Mapping[str, Any], cell: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Kind theorem_convergence: the gap of a cell against T, a line for each way of drawing blocks, beside its printed bound."""
    look = numbered([row["label"] for row in rows])
    lines = []
    for row in rows:
        style = look[row["label"]]
        lines.append(Series(row["label"], row["steps"], row["gaps"], row["spreads"], style))
        lines.append(
            Series(
                f"{row['label']}, bound",
                row["steps"],
                row["bounds"],
                style=Style(style.colour, "dotted"),
                faint=True,
            )
        )
    worst = max(rows, key=lambda row: row["ratio"])
    return Figure(
        file_name(cell), f"{cell}: gap of the averaged iterate; thin: its bound", "steps T", "f(mean iterate) - f*", lines,
        log_x=True, log_y=True, description=f"The largest gap / bound is {worst['ratio']:.3g}, for {worst['label']}.",
    )  # fmt: skip


def distances(
    cell: str, sizes: Sequence[int], lines: Mapping[str, Sequence[Sequence[float]]]
) -> Figure:
    """Kind theorem_generalisation: squared Hellinger distances and certificates against n, with spreads over seeds."""
    look, series = numbered(list(lines)), []
    for name, rows in lines.items():
        means, spreads = mean_and_spread(rows)
        series.append(Series(name, list(sizes), means, spreads, look[name]))
    ends = ", ".join(f"{one.name} {one.y[-1]:.3g}" for one in series)
    return Figure(
        file_name(cell), f"{cell}: squared Hellinger distance to the truth", "examples per client n", "distance, or bound",
        series, log_x=True, log_y=True, description=f"At n = {sizes[-1]}: {ends}.",
    )  # fmt: skip
