"""What the studies of this folder share: a list of variants, a record per run in a file, and the table of the records.

A variant is an algorithm and what differs from the study's settings and the defaults: `name=value` for a setting of the run,
`algorithm.name=value` for one of the algorithm's own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhb import data
from fedhb.runs.from_settings import train
from fedhb.runs.run import Run
from fedhb.runs.settings import Settings

FASHION = {
    "dataset": "fashion-mnist",
    "num_clients": 100,
    "shards_per_client": 5,
    "fraction": 0.1,
    "local_epochs": 1,
    "rounds": 100,
}
"""The paper's setting for Fashion-MNIST."""

SEEDS = {"validation": (100, 101), "test": (0, 1, 2)}
HELD_BACK = {"validation": {"validation": 0.1, "evaluate_on": "validation"}, "test": {}}


def study(folder: Path, split: str, variants: Sequence[Sequence[str]]) -> None:
    """Run what FOLDER/SPLIT.jsonl does not hold yet, then print the table."""
    path = folder / f"{split.upper()}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(tuple(r["variant"]), r["seed"]) for r in records}
    datasets: dict[str, Any] = {}
    for seed in SEEDS[split]:
        for variant in variants:
            if (tuple(variant), seed) in done:
                continue
            settings = settings_of(variant, split, seed)
            if settings.data.dataset not in datasets:
                datasets[settings.data.dataset] = data.load(settings.data.dataset)
            run = train(settings, None, dataset=datasets[settings.data.dataset], progress=False)
            records.append(record_of(variant, seed, run))
            with path.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
            accuracies = [
                f"{100 * records[-1][task]['accuracy']:.2f}" for task in ("global", "personalised")
            ]
            print(f"{' '.join(variant)} seed {seed}: {' / '.join(accuracies)}", flush=True)
    print(table(records))


def settings_of(variant: Sequence[str], split: str, seed: int) -> Settings:
    """The settings of one run."""
    algorithm, *changes = variant
    own = dict(change.split("=") for change in changes if "." not in change.split("=")[0])
    numbers = {key: value if key == "dataset" else json.loads(value) for key, value in own.items()}
    flags = FASHION | HELD_BACK[split] | numbers | {"algorithm": algorithm, "seed": seed}
    return Settings.resolve(
        None, flags, [change for change in changes if change.split("=")[0] not in own]
    )


def record_of(variant: Sequence[str], seed: int, run: Run) -> dict[str, Any]:
    """What is kept of a run."""
    shares = [r["penalty_share"] for r in run.records if "penalty_share" in r]
    return {
        "variant": list(variant),
        "seed": seed,
        "global": run.result["global"],
        "personalised": run.result["personalised"],
        "holdout": run.result["holdout"],
        "penalty_share": statistics.fmean(shares) if shares else None,
        "effective_prototypes": [
            r["effective_prototypes"] for r in run.records[::10] if "effective_prototypes" in r
        ],
        "seconds": run.result["seconds"],
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line per variant, means and deviations over seeds; columns that no variant has are left out."""
    tasks = ("global", "personalised")
    titles = [
        f"{task} {metric}" if metric == "accuracy" else metric
        for task in tasks
        for metric in ("accuracy", "NLL", "ECE")
    ]
    held_out = any(r.get("holdout") for r in records)
    shares = any(r["penalty_share"] is not None for r in records)
    titles += [f"hold-out {task}" for task in tasks if held_out] + ["KL share"] * shares
    lines = [f"| settings | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for variant in dict.fromkeys(tuple(r["variant"]) for r in records):
        mine = [r for r in records if tuple(r["variant"]) == variant]
        cells = []
        for task in tasks:
            for metric, scale, digits in (("accuracy", 100, 2), ("nll", 1, 3), ("ece", 1, 3)):
                cells.append(cell([scale * r[task][metric] for r in mine], digits))
        if held_out:
            novel = [r["holdout"] for r in mine if r.get("holdout")]
            cells += [cell([100 * r[task]["accuracy"] for r in novel], 2) for task in tasks]
        if shares:
            values = [100 * r["penalty_share"] for r in mine if r["penalty_share"] is not None]
            cells.append(f"{statistics.fmean(values):.1f} %" if values else "")
        lines.append(f"| {' '.join(variant)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[float], digits: int) -> str:
    """The mean, and the deviation where there are three values or more."""
    spread = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 2 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}" if values else ""
