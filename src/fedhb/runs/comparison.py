"""Several runs as one comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhb import data
from fedhb.engine.loop import Callback
from fedhb.errors import DivergedError
from fedhb.files import as_json, check_unused, write_atomically
from fedhb.runs.from_settings import algorithm_of, train
from fedhb.runs.settings import Settings


def compare(
    settings: Mapping[str, Settings],
    seeds: Sequence[int],
    out: Path,
    resume: bool = False,
    on_result: Callable[[dict[str, Any]], None] = lambda row: None,
    callbacks: Callable[[str, int, Path], Sequence[Callback]] = lambda name, seed, folder: (),
    progress: bool = True,
    flags: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every algorithm with its settings and every seed; each run in OUT/ALGORITHM-seedN, the table in OUT/comparison.json.

    With `resume`, runs that are done are taken as they are, and one that was stopped goes on. A run that diverges does not keep
    the others from being run: it has no part in the means, and is told at the end.
    `callbacks(algorithm, seed, folder)` are told of the rounds of a run; `flags` as in `make_clients`.

    Returns:
        A row for each algorithm, and what stopped the runs that diverged, by their folders' names.
    """
    runs = [replace(one, algorithm=name, seed=seed) for seed in seeds for name, one in settings.items()]
    for one in runs:  # before the first run: a wrong setting should not cost an hour
        algorithm_of(one)
    check_unused(out, "go on with what is there (--resume), or choose another --out", resume)
    first = next(iter(settings.values()))
    dataset = data.read_npz(first.data) if first.data else data.load(first.dataset)
    results, diverged = [], {}
    for one in runs:
        label = f"{one.algorithm}-seed{one.seed}"
        told = callbacks(one.algorithm, one.seed, out / label)
        try:
            result = train(one, out / label, resume, dataset, progress, told, flags).result
        except DivergedError as error:
            diverged[label] = str(error)
            continue
        results.append(result)
        on_result(result)
    rows = tabulate(results)
    lines = {name: one.to_toml({}).splitlines() for name, one in settings.items()}
    write_atomically(out / "comparison.json", as_json({"settings": lines, "rows": rows, "diverged": diverged}))
    return rows, diverged


def tabulate(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per algorithm: the mean and standard deviation over seeds of every metric of both tasks."""
    rows = []
    for name in dict.fromkeys(r["algorithm"] for r in results):
        mine = [r for r in results if r["algorithm"] == name]
        row: dict[str, Any] = {"algorithm": name, "seeds": [r["seed"] for r in mine]}
        for task in ("global", "personalised", "holdout_global", "holdout_personalised"):
            values = [_task(r, task) for r in mine]
            if all(v is not None for v in values):
                row[task] = {
                    metric: {
                        "mean": statistics.fmean(v[metric] for v in values),
                        "std": statistics.stdev(v[metric] for v in values) if len(values) > 1 else 0.0,
                    }
                    for metric in values[0]
                }
        row["seconds"] = statistics.fmean(r["seconds"]["train"] for r in mine)
        rows.append(row)
    return rows


def _task(result: dict[str, Any], task: str) -> Any:
    if task.startswith("holdout_"):
        return result["holdout"] and result["holdout"][task.removeprefix("holdout_")]
    return result[task]
