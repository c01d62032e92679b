"""Kind `novel`: clients that never trained personalise with n of their own examples, for several n.

Each key is trained once. The hold-out clients (`holdout_clients` in the settings) then personalise
with the first n of their training examples in a drawn order, n from `examples`, and are tested on
all of their test examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedhb.errors import InputError
from fedhb.report.figures import Figure
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.jobs import Tell
from fedhb.runs.progress import TellRounds
from fedhb.runs.records import Key
from fedhb.runs.run_grid import dataset_of, settings_of
from fedhb_paper import cells, pictures
from fedhb_paper.cells import work
from fedhb_paper.stale_records import star
from fedhb_paper.table import diverged, metrics_in, spread

__all__ = ["figures", "resolved", "run", "tables", "work"]


def resolved(settings: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Return the settings of the run, and the numbers of examples."""
    if not settings.get("examples"):
        raise InputError(
            "settings.toml has no examples: "
            "give the numbers of examples to personalise with, such as [5, 20]"
        )
    return cells.resolved(settings, key) | {"examples": list(settings["examples"])}


def run(settings: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Return the metrics of the novel clients before personalisation, and after it.

    `after` has them for each number of examples.
    """
    chosen = settings_of(settings, key)
    dataset = dataset_of(chosen.data.dataset, chosen.data.file)
    trained = train(
        chosen,
        folder,
        resume=True,
        dataset=dataset,
        progress=False,
        callbacks=[TellRounds(tell, 0.8)],
    )
    _, novel = make_clients(chosen, dataset)
    if novel is None:
        raise InputError(
            f"cell {key['cell']!r} holds out no clients: give holdout_clients, such as 20"
        )
    after = {}
    for done, n in enumerate(settings["examples"]):
        tell(0.8 + 0.2 * done / len(settings["examples"]), f"{n} examples")
        after[str(n)] = trained.evaluate(
            novel.with_at_most(n, chosen.seed), chosen.evaluation.split
        )["personalised"]
    return {"before": trained.result["holdout"]["global"], "after": after}


def tables(
    settings: Mapping[str, Any], printed: Sequence[Any], records: Sequence[Mapping[str, Any]]
) -> list[Table]:
    """Return a table for every cell and metric: variants by numbers of examples."""
    shown = []
    numbers = [str(n) for n in settings["examples"]]
    for cell in dict.fromkeys(r["key"]["cell"] for r in records):
        for metric, factor, digits in metrics_in(
            *(r["result"].get("before", {}) for r in records if r["key"]["cell"] == cell)
        ):
            title = f"{cell}: {metric} of novel clients by their number of examples"
            table = Table("", "none", *numbers, title=title)
            for variant in settings["variants"]:
                all_ = [
                    r for r in records if (r["key"]["cell"], r["key"]["variant"]) == (cell, variant)
                ]
                complete = [r for r in all_ if set(numbers) <= set(r["result"].get("after", ()))]
                old = star(complete)
                columns = [
                    [r["result"]["before"] for r in complete],
                    *([r["result"]["after"][n] for r in complete] for n in numbers),
                ]
                texts = [
                    spread([factor * m[metric] for m in each], digits) + old if each else ""
                    for each in columns
                ]
                if all_:
                    table.add_row(variant + diverged(all_), *texts)
            shown.append(table)
    return shown


def figures(
    settings: Mapping[str, Any], printed: Sequence[Any], records: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    """Return figures of accuracy and NLL against the number of examples."""
    return pictures.few_examples(settings, records)
