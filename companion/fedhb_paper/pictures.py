"""The figures of experiments as plain data, made from the records that the tables show."""

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
"""The number of values of a parameter that make a figure over it."""
DECADE = 10.0
"""The ratio of the largest to the least value of a curve that makes its axis logarithmic.

Below it, such an axis would have hardly a number on it.
"""
TASKS = {"global": "global prediction", "personalised": "personalisation"}


def of(records: Sequence[Record], cell: str, variant: str) -> list[Mapping[str, Any]]:
    """Return the results of a cell and variant that are valid and did not diverge."""
    return [
        record["result"]
        for record in records
        if (record["key"]["cell"], record["key"]["variant"]) == (cell, variant)
        and not record.get("stale")
        and "diverged" not in record["result"]
    ]


def file_name(*parts: str) -> str:
    """Return a name for a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(parts)).strip("-").lower()


def numbered(names: Sequence[str]) -> dict[str, Style]:
    """Return a style for each of these names, which are no methods."""
    return {
        name: Style(COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % 3], MARKS[k % 4])
        for k, name in enumerate(names)
    }


def curves(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind convergence (fig:mnist_convergence, fig:cifar_dynamics): curves by round.

    They are the negative ELBO and the loss, with a line for each cell.
    """
    shown = []
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
                shown.append(
                    Figure(
                        file_name(variant, key),
                        title,
                        "round",
                        label,
                        lines,
                        description=ends,
                        log_y=0 < DECADE * min(values) < max(values),
                    )
                )
    return shown


def by_epoch(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind convergence with `epochs` (fig:cifar_dynamics, right): curves of personalisation.

    They are the accuracy and the NLL of clients by epochs of personalisation.
    """
    epochs, shown = list(settings.get("epochs", ())), []
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
                shown.append(
                    Figure(
                        file_name(cell, "personalisation", metric),
                        f"{cell}: while clients personalise",
                        "epochs of personalisation",
                        label,
                        lines,
                        percent=metric == "accuracy",
                        description=f"{gains}.",
                    )
                )
    return shown


def parameters(
    settings: Mapping[str, Any], printed: Sequence[Record], records: Sequence[Record]
) -> list[Figure]:
    """Kind table, where variants differ in one parameter (fig:abl_hparam, fig:ens_baseline).

    The figures show accuracy against the parameter.
    """
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
    # variants without the parameter are levels to compare with
    plain = [name for name in settings["variants"] if name not in split]
    look = styles([*methods, *plain])
    shown = []
    for cell in settings["cells"]:
        for task, label in TASKS.items():
            lines = []
            for method in [*methods, *plain]:
                variants = [
                    method if method in plain else f"{method} {parameter}={value}"
                    for value in values
                ]
                rows = [_accuracies(of(records, cell, variant), task) for variant in variants]
                ours = [mean_and_spread([[value] for value in row]) for row in rows]
                y = [means[0] if means else None for means, _ in ours]
                spread = [spreads[0] if spreads else None for _, spreads in ours]
                if any(value is not None for value in y):
                    lines.append(Series(method, values, y, spread, look[method]))
                of_paper = [_printed(printed, cell, variant, task) for variant in variants]
                if any(value is not None for value in of_paper):
                    style = Style(look[method].colour, "dotted", look[method].mark)
                    lines.append(Series(f"{method}, printed", values, of_paper, style=style))
            best = [
                f"{line.name} {100 * max(y for y in line.y if y is not None):.2f} %"
                for line in lines
            ]
            shown.append(
                Figure(
                    file_name(cell, task),
                    f"{cell}: {label} against {parameter}",
                    parameter,
                    "accuracy",
                    lines,
                    percent=True,
                    description=f"Best accuracies: {', '.join(best)}.",
                )
            )
    return shown


def _accuracies(results: Sequence[Mapping[str, Any]], task: str) -> list[float]:
    """Return the accuracies of a task, of the results that have one."""
    metrics = [result.get(task) or {} for result in results]
    return [each["accuracy"] for each in metrics if "accuracy" in each]


def _printed(printed: Sequence[Record], cell: str, variant: str, task: str) -> float | None:
    wanted = (cell, variant, task, "accuracy")
    rows = [
        row
        for row in printed
        if (row["cell"], row["algorithm"], row["task"], row["metric"]) == wanted
    ]
    return rows[0]["mean"] / 100 if rows and isinstance(rows[0]["mean"], float) else None


def few_examples(settings: Mapping[str, Any], records: Sequence[Record]) -> list[Figure]:
    """Kind novel: accuracy and NLL of novel clients against their number of examples.

    There is a line for each variant.
    """
    numbers = [str(n) for n in settings["examples"]]
    look, shown = styles(list(settings["variants"])), []
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
            shown.append(
                Figure(
                    file_name(cell, metric),
                    f"{cell}: {label} of novel clients",
                    "examples of its own",
                    label,
                    lines,
                    percent=metric == "accuracy",
                    log_y=metric == "nll",
                    description=f"With {numbers[-1]} examples: {ends}.",
                )
            )
    return shown


def gaps(settings: Mapping[str, Any], cell: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Kind theorem_convergence: the gap of a cell against T, beside its printed bound.

    There is a line for each way of drawing blocks.
    """
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
        file_name(cell),
        f"{cell}: gap of the averaged iterate; thin: its bound",
        "steps T",
        "f(mean iterate) - f*",
        lines,
        log_x=True,
        log_y=True,
        description=f"The largest gap / bound is {worst['ratio']:.3g}, for {worst['label']}.",
    )


def distances(
    cell: str, sizes: Sequence[int], lines: Mapping[str, Sequence[Sequence[float]]]
) -> Figure:
    """Kind theorem_generalisation: squared Hellinger distances and certificates against n.

    Spreads are over seeds.
    """
    look, series = numbered(list(lines)), []
    for name, rows in lines.items():
        means, spreads = mean_and_spread(rows)
        series.append(Series(name, list(sizes), means, spreads, look[name]))
    ends = ", ".join(f"{line.name} {line.y[-1]:.3g}" for line in series)
    return Figure(
        file_name(cell),
        f"{cell}: squared Hellinger distance to the truth",
        "examples per client n",
        "distance, or bound",
        series,
        log_x=True,
        log_y=True,
        description=f"At n = {sizes[-1]}: {ends}.",
    )
