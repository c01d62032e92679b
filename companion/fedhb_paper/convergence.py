"""Kind `convergence`: the negative ELBO against rounds (fig:mnist_convergence).

Do all participation rates reach the same value? The result of a key is the curve of `negative_elbo`
and of the clients' loss, one value a round, and the metrics at the end. The negative ELBO of a
round is its N/N_f estimate from the cohort (docs/deviations.md). `optimum` names the cell that
stands for the centralised optimum: all clients in every round, each going on from its own last m_i,
which is block-coordinate descent on the whole objective in one place.

Where settings.toml has `epochs`, such as [1, 2, 5], the result also has the metrics of a
personalisation that stops after so many epochs (fig:cifar_dynamics, right). Test data are read
after the last round only, so the curves by round have no accuracies.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedhb.report.figures import Figure
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.jobs import Tell
from fedhb.runs.progress import TellRounds
from fedhb.runs.records import Key
from fedhb.runs.run_grid import dataset_of, settings_of
from fedhb_paper import cells, pictures
from fedhb_paper.cells import work
from fedhb_paper.table import diverged, label, seeds_of, spread

__all__ = ["figures", "resolved", "run", "tables", "work"]

ROUNDS = (1, 5, 10, 20, 50, 100, 200, 300)
LAST = 5
"""The value at the end is the mean of so many rounds: a cohort's estimate is noisy."""


def resolved(settings: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return the settings of the run, and the numbers of epochs."""
    return cells.resolved(settings, key) | (
        {"epochs": list(settings["epochs"])} if settings.get("epochs") else {}
    )


def run(settings: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train, and return the curves and the metrics."""
    chosen = settings_of(settings, key)
    dataset, epochs = (
        dataset_of(chosen.data.dataset, chosen.data.file),
        list(settings.get("epochs", ())),
    )
    until = 0.5 if epochs else 0.9
    trained = train(
        chosen,
        folder,
        resume=True,
        dataset=dataset,
        progress=False,
        callbacks=[TellRounds(tell, until)],
    )
    clients, _ = make_clients(chosen, dataset)
    after = {chosen.personalisation.epochs: trained.result["personalised"]}
    for k, count in enumerate(epochs):
        if count not in after:
            tell(until + (1.0 - until) * k / len(epochs), f"personalisation, {count} epochs")
            after[count] = trained.evaluate(clients, chosen.evaluation.split, epochs=count)[
                "personalised"
            ]
    return {
        **{name: [r.get(name) for r in trained.records] for name in ("negative_elbo", "loss")},
        "global": trained.result["global"],
        "personalised": trained.result["personalised"],
        **({"after": {str(count): after[count] for count in epochs}} if epochs else {}),
    }


def tables(
    settings: Mapping[str, Any], printed: Sequence[Any], records: Sequence[Mapping[str, Any]]
) -> list[Table]:
    """Return a table for each variant, with a row for each cell.

    It has the mean curve at some rounds, its end, and how far the end is above the optimum.
    """
    shown = []
    for variant in dict.fromkeys(r["key"]["variant"] for r in records):
        runs = {
            c: [r for r in records if (r["key"]["cell"], r["key"]["variant"]) == (c, variant)]
            for c in settings["cells"]
        }
        curves = {cell: _curves(of_cell) for cell, of_cell in runs.items() if of_cell}
        longest = max((len(curve) for each in curves.values() for curve in each), default=0)
        rounds = [n for n in ROUNDS if n <= longest]
        optimum = settings.get("optimum")
        least = (
            statistics.fmean(end(curve) for curve in curves[optimum])
            if curves.get(optimum)
            else None
        )
        title = f"{variant}: negative ELBO by round"
        table = Table(
            "",
            *map(str, rounds),
            "end",
            *(["above the optimum"] if least is not None else []),
            title=title,
        )
        for cell, each in curves.items():
            name = cell + diverged(runs[cell]) + label(runs[cell], [seeds_of(runs[cell])])
            if not each:
                table.add_row(name)
                continue
            values = [
                statistics.fmean(c[n - 1] for c in each) if n <= len(each[0]) else None
                for n in rounds
            ]
            ends = [end(curve) for curve in each]
            around = f" ±{statistics.stdev(ends):,.0f}" if len(ends) > 1 else ""
            above = [f"{statistics.fmean(ends) - least:+,.0f}"] if least is not None else []
            texts = ["" if value is None else f"{value:,.0f}" for value in values]
            table.add_row(name, *texts, f"{statistics.fmean(ends):,.0f}{around}", *above)
        shown.append(table)
    return shown + _personalisation(settings, records)


def _personalisation(
    settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[Table]:
    """Return a table of accuracy by epochs of personalisation, where there are such records."""
    epochs = [str(count) for count in settings.get("epochs", ())]
    table = Table("", "0", *epochs, title="accuracy by epochs of personalisation")
    for variant in settings["variants"]:
        for cell in settings["cells"]:
            done = [
                r
                for r in pictures.of(records, cell, variant)
                if epochs and set(epochs) <= set(r.get("after", ()))
            ]
            columns = [
                [r["global"] for r in done],
                *([r["after"][n] for r in done] for n in epochs),
            ]
            if done and "accuracy" in done[0]["global"]:
                table.add_row(
                    f"{variant}, {cell}",
                    *(spread([100 * m["accuracy"] for m in each], 2) for each in columns),
                )
    return [table] if table.row_count else []


def figures(
    settings: Mapping[str, Any], printed: Sequence[Any], records: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    """Return the curves of training, and of personalisation."""
    return pictures.curves(settings, records) + pictures.by_epoch(settings, records)


def end(curve: Sequence[float]) -> float:
    """Return the value at the end of a curve."""
    return statistics.fmean(curve[-LAST:])


def _curves(records: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the curves of the runs that are valid and did not diverge."""
    results = [r["result"] for r in records if not r.get("stale")]
    return [
        result["negative_elbo"]
        for result in results
        if None not in result.get("negative_elbo", [None])
    ]
