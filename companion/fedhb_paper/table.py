"""Kind `table`: train every variant in every cell, evaluate before and after personalisation.

The result of a key has the metrics of both tasks (means over clients, last round) and of hold-out
clients, the mean over rounds of the prior's share of the clients' objective, bytes, seconds, the
data set's title and the hashes of its files. In some cases it has more:

    gates         of a mixture: its global prediction under other gates
    population    where clients predict with what they remember: the prediction without it
    leak          where images have copies in several groups: images that were trained on
    clean         where settings.toml has `clean`: global prediction on that data set's images
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from rich.table import Table

from fedhb import data
from fedhb.engine.loop import State
from fedhb.evaluation.evaluate import mean
from fedhb.report.figures import Figure
from fedhb.runs.from_settings import train
from fedhb.runs.jobs import Tell
from fedhb.runs.progress import TellRounds
from fedhb.runs.records import Key
from fedhb.runs.run import Run, one_thread
from fedhb.runs.run_grid import dataset_of, settings_of
from fedhb.runs.settings import Settings
from fedhb_paper import clean_images, gates, pictures, ranks, trained_copies
from fedhb_paper.cells import clients_of, resolved, work
from fedhb_paper.stale_records import star

__all__ = ["figures", "resolved", "run", "tables", "work"]

METRICS = (("accuracy", 100, 2), ("nll", 1, 3), ("ece", 1, 3), ("rmse", 1, 3), ("coverage", 100, 1))
"""The metrics of the tables, each with its factor and its digits.

Printed accuracies are in percent.
"""

NAMES = {
    "global": "global prediction",
    "population": "global prediction by the server alone",
    "clean": "global prediction of images as they are, which no client has",
    "personalised": "personalisation",
    "holdout_global": "novel clients, global prediction",
    "holdout_personalised": "novel clients, personalisation",
}

Record = Mapping[str, Any]


def run(settings: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train and evaluate, and return the result."""
    chosen = settings_of(settings, key)
    trained = train(
        chosen,
        folder,
        resume=True,
        dataset=dataset_of(chosen.data.dataset, chosen.data.file),
        progress=False,
        callbacks=[TellRounds(tell, 0.9)],
    )
    shares = [r["penalty_share"] for r in trained.records if "penalty_share" in r]
    holdout = trained.result["holdout"] or {}
    result = {
        "global": trained.result["global"],
        "personalised": trained.result["personalised"],
        **{f"holdout_{task}": holdout[task] for task in ("global", "personalised") if holdout},
        "penalty_share": statistics.fmean(shares) if shares else None,
        "bytes": trained.result["communication"]["per_client_round"],
        "seconds": trained.result["seconds"],
        "dataset": trained.result["dataset"],
        "data": trained.result["data"],
    }
    if settings.get("clean"):
        tell(0.95, f"training images of {settings['clean']}")
        result["clean"] = clean_images.metrics(trained, data.load(settings["clean"]))
    others = {
        "gates": gates.metrics(trained, chosen),
        "leak": trained_copies.metrics(trained, chosen),
        "population": population(trained, chosen),
    }
    return result | {name: other for name, other in others.items() if other}


def population(run: Run, settings: Settings) -> dict[str, float]:
    """Return the metrics of the global prediction by the server's state alone.

    A client of FedEM or FedPop that took part predicts with its own mixture weights or heads: a
    personal model among the others' global ones. Where clients add nothing, the result is empty.
    """
    clients, _ = clients_of(run, settings)
    if not run.algorithm.remember(run.problem, clients.select([0])):
        return {}
    with one_thread():
        evaluation = run.evaluation(settings.evaluation.split)
        evaluation = replace(evaluation, state=State(run.state.server))
        metrics = mean(evaluation.global_metrics(clients))
    return metrics if metrics != run.result["global"] else {}


def of_task(result: Mapping[str, Any], task: str) -> Mapping[str, float] | None:
    """Return the metrics of a task, if a result has them.

    Where clients remember nothing, their global prediction is that of the population.
    """
    return result.get(task) or (result.get("global") if task == "population" else None)


def tables(
    settings: Mapping[str, Any], printed: Sequence[Record], records: Sequence[Record]
) -> list[Table]:
    """Return a table for each task and metric, with a column for each cell.

    Printed numbers stand beside ours. A single cell has one table for each task, with the metrics
    as columns. Tables of ranks, gates and trained images follow where they apply.
    """
    cells = _in_order(
        settings["cells"], [r["key"]["cell"] for r in records], [row["cell"] for row in printed]
    )
    variants = _in_order(
        settings["variants"],
        [r["key"]["variant"] for r in records],
        [row["algorithm"] for row in printed],
    )
    lost = ["global"] if any("diverged" in r["result"] for r in records) else []
    used = {
        *lost,
        *(row["task"] for row in printed),
        *(name for r in records for name in r["result"]),
    }
    tasks = [task for task in NAMES if task in used]
    of_cell = {cell: [r for r in records if r["key"]["cell"] == cell] for cell in cells}
    seeds = {cell: sets_of_seeds(of_cell[cell]) for cell in cells}
    labels = {cell: f"{cell}{label(of_cell[cell], seeds[cell])}" for cell in cells}

    def text(cell: str, variant: str, task: str, metric: str, factor: float, digits: int) -> str:
        chosen = [r for r in of_cell[cell] if r["key"]["variant"] == variant]
        lines = [ours(chosen, task, metric, factor, digits, name_seeds=len(seeds[cell]) > 1)]
        name = cell, variant, task, metric
        for row in printed:
            if (row["cell"], row["algorithm"], row["task"], row["metric"]) == name:
                lines.append(as_printed(row, digits))
        return "\n".join(filter(None, lines))

    texts: dict[str, dict[str, list[str]]] = {}  # title -> head of a column -> its texts
    for task in [
        *tasks,
        *dict.fromkeys(row["task"] for row in printed if row["task"] not in tasks),
    ]:
        of_paper = {row["metric"]: row for row in printed if row["task"] == task}
        for metric, *how in metrics_in(
            of_paper, *(of_task(r["result"], task) or {} for r in records)
        ):
            columns = {
                labels[cell]: [text(cell, variant, task, metric, *how) for variant in variants]
                for cell in cells
            }
            if not any(any(column) for column in columns.values()):
                continue
            name = NAMES.get(task, task)
            if len(cells) == 1:
                head = labels[cells[0]]
                texts.setdefault(f"{name}: {head}", {})[metric] = columns[head]
            else:
                texts[f"{name}: {metric}"] = columns
    shown = []
    for title, columns in texts.items():
        table = Table("", *columns, title=title, show_lines=True)
        for row in zip(variants, *columns.values(), strict=True):
            table.add_row(*row)
        shown.append(table)
    return shown + rank_table(variants, tasks, records) + gate_table(records) + leak_table(records)


def metrics_in(*results: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return those of METRICS that some of these results have; accuracy where there are none."""
    return [entry for entry in METRICS if any(entry[0] in result for result in results)] or [
        METRICS[0]
    ]


def figures(
    settings: Mapping[str, Any], printed: Sequence[Record], records: Sequence[Record]
) -> list[Figure]:
    """Return figures of accuracy against a parameter, where variants differ in one."""
    return pictures.parameters(settings, printed, records)


def label(records: Sequence[Record], seeds: Sequence[str]) -> str:
    """Return the line below a cell's name: its records' data set, width, rounds and seeds."""
    if not records:
        return ""

    def every(values: Iterable[Any]) -> str:
        return " or ".join(dict.fromkeys(str(value) for value in values))

    named = [(r["result"].get("dataset"), r["settings"].get("dataset")) for r in records]
    parts = list(dict.fromkeys(title for title, name in named if title and title != name))
    if all(r["settings"].get("model") == "mobilenet" for r in records):
        parts.append(f"width {every(r['settings'].get('model.width', 1) for r in records)}")
    parts.append(f"{every(r['settings'].get('rounds') for r in records)} rounds")
    return "\n" + ", ".join([*parts, *(seeds if len(seeds) == 1 else [])])


def sets_of_seeds(records: Sequence[Record]) -> list[str]:
    """Return the seeds of every variant; one text where all have the same."""
    return list(
        dict.fromkeys(
            seeds_of([r for r in records if r["key"]["variant"] == record["key"]["variant"]])
            for record in records
        )
    )


def seeds_of(records: Sequence[Record]) -> str:
    """Return the seeds of these records."""
    seeds = sorted(r["key"]["seed"] for r in records)
    return f"seed{'s' if len(seeds) > 1 else ''} {','.join(map(str, seeds))}"


def ours(
    records: Sequence[Record], task: str, metric: str, factor: float, digits: int, name_seeds: bool
) -> str:
    """Return the mean ± deviation over seeds, with a * where settings have changed since.

    `name_seeds`: whether the seeds are named, because those of other variants differ.
    """
    metrics = [of_task(r["result"], task) or {} for r in records]
    values = [factor * each[metric] for each in metrics if metric in each]
    seeds = f" ({seeds_of(records)})" if name_seeds else ""
    text = f"{spread(values, digits)}{star(records)}{seeds}" if values else ""
    return text + diverged(records)


def diverged(records: Sequence[Record]) -> str:
    """Return how many of these runs diverged, in words; nothing where none did."""
    lost = sum("diverged" in r["result"] for r in records)
    return f" {lost} diverged" if lost else ""


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean, and the deviation where there is more than one value."""
    deviation = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def as_printed(row: Record, digits: int) -> str:
    """Return a number of the paper as text."""
    deviation = f" ±{row['std']:.{digits}f}" if row["std"] is not None else ""
    return f"[dim]printed {row['mean']:.{digits}f}{deviation}[/dim]"


def rank_table(
    variants: Sequence[str], tasks: Sequence[str], records: Sequence[Record]
) -> list[Table]:
    """Return a table of mean ranks by accuracy, and of whether they differ.

    The means are over the blocks (cell and seed) that every variant with a record has.
    """
    compared = {
        task: comparison for task in tasks if (comparison := ranked(variants, task, records))
    }
    if not compared:
        return []
    table = Table("", *(NAMES[task] for task in compared), title="mean ranks by accuracy")
    for variant in variants:
        if any(variant in each for each, _ in compared.values()):
            table.add_row(
                variant,
                *(
                    f"{each[variant]:.2f}" if variant in each else ""
                    for each, _ in compared.values()
                ),
            )
    table.add_section()
    results = [result for _, result in compared.values()]
    table.add_row("blocks: cell and seed", *(str(r.blocks) for r in results))
    table.add_row("Friedman chi2, p", *(f"{r.chi2:.2f}, {r.p:.2g}" for r in results))
    table.add_row(
        "critical difference (Nemenyi, 5 %)",
        *(f"{r.critical:.2f}" if r.critical is not None else "" for r in results),
    )
    return [table]


def ranked(
    variants: Sequence[str], task: str, records: Sequence[Record]
) -> tuple[dict[str, float], ranks.Comparison] | None:
    """Return each variant's mean rank, and the comparison; None if there is nothing to compare."""
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for r in records:
        diverged = "diverged" in r["result"]  # the worst of its block
        metrics = of_task(r["result"], task)
        if ((metrics and "accuracy" in metrics) or diverged) and not r.get("stale"):
            score = metrics["accuracy"] if metrics and not diverged else -math.inf
            scores.setdefault((r["key"]["cell"], r["key"]["seed"]), {})[r["key"]["variant"]] = score
    names = [v for v in variants if any(v in block for block in scores.values())]
    blocks = [
        [block[v] for v in names] for block in scores.values() if all(v in block for v in names)
    ]
    if len(names) < 2 or len(blocks) < 2:
        return None
    result = ranks.compare(blocks)
    return dict(zip(names, result.ranks, strict=True)), result


def gate_table(records: Sequence[Record]) -> list[Table]:
    """Return a table of the global accuracy of mixtures under several gates (see gates.py)."""
    return accuracies(
        records,
        "mixtures: global accuracy by gate",
        {gate: ("gates", gate) for gate in gates.GATES},
    )


def leak_table(records: Sequence[Record]) -> list[Table]:
    """Return a table of the global accuracy of images by whether a copy was trained on."""
    columns = {
        "known groups, test images": ("global",),
        "known groups, training images": ("leak", "known"),
        "novel groups, test images": ("holdout_global",),
        "novel groups, images that others train on": ("leak", "novel"),
    }
    return accuracies(
        records, "global accuracy of images no copy of which was trained on, and of others", columns
    )


def accuracies(
    records: Sequence[Record], title: str, columns: Mapping[str, Sequence[str]]
) -> list[Table]:
    """Return a table of the accuracies of every cell and variant, if any result has them.

    Args:
        records: the records.
        title: of the table.
        columns: for each column, the path to its metrics in a result.
    """
    rows_of: dict[tuple[str, str], list[tuple[Record, list[float]]]] = {}
    for r in records:
        places = [
            reduce(lambda part, name: part.get(name) or {}, path, r["result"])
            for path in columns.values()
        ]
        if all("accuracy" in place for place in places):
            each = rows_of.setdefault((r["key"]["cell"], r["key"]["variant"]), [])
            each.append((r, [100 * metrics["accuracy"] for metrics in places]))
    if not rows_of:
        return []
    table = Table("cell", "", *columns, title=title)
    for (cell, variant), rows in rows_of.items():
        values = zip(*(row for _, row in rows), strict=True)
        table.add_row(
            cell,
            f"{variant}{star([r for r, _ in rows])}",
            *(spread(column, 2) for column in values),
        )
    return [table]


def _in_order(known: Iterable[str], *used: Sequence[str]) -> list[str]:
    """Return the used names in the order of the settings, then those of the paper alone."""
    names = {name for each in used for name in each}
    return [name for name in known if name in names] + [
        n for n in dict.fromkeys(used[-1]) if n not in set(known)
    ]
