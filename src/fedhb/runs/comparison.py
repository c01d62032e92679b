"""Several runs as one comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhb.engine.loop import Callback
from fedhb.errors import DivergedError
from fedhb.files import as_json, check_unused, write_atomically
from fedhb.runs.from_settings import algorithm_of, read_dataset, train
from fedhb.runs.settings import Settings


class Listener:
    """A listener to a comparison; subclasses override the methods they need."""

    def callbacks(self, algorithm: str, seed: int, folder: Path) -> Sequence[Callback]:
        """Return the listeners to a run."""
        return ()

    def on_result(self, result: dict[str, Any]) -> None:
        """A run is done; `result` is the content of its result.json."""
        return


def compare(
    settings: Mapping[str, Settings],
    seeds: Sequence[int],
    out: Path,
    resume: bool = False,
    listener: Listener | None = None,
    progress: bool = True,
    flags: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Train every algorithm with its settings and every seed.

    Each run is in OUT/ALGORITHM-seedN, the table in OUT/comparison.json. A run that diverges does
    not stop the others: it has no part in the means.

    Args:
        settings: of each algorithm.
        seeds: of the runs of each.
        out: the folder.
        resume: keep runs that are done, and go on with one that was stopped.
        listener: is told of the runs.
        progress: show it.
        flags: of the command line, as in `make_population`.

    Returns:
        A row for each algorithm, and why runs diverged, by their folders' names.
    """
    runs = [
        replace(chosen, algorithm=name, seed=seed)
        for seed in seeds
        for name, chosen in settings.items()
    ]
    for chosen in runs:  # before the first run: a wrong setting should not cost an hour
        algorithm_of(chosen)
    check_unused(out, "go on with what is there (--resume), or choose another --out", resume)
    listener = listener or Listener()
    dataset = read_dataset(runs[0])
    results, diverged = [], {}
    for chosen in runs:
        label = f"{chosen.algorithm}-seed{chosen.seed}"
        callbacks = listener.callbacks(chosen.algorithm, chosen.seed, out / label)
        try:
            run = train(chosen, out / label, resume, dataset, progress, callbacks, flags)
        except DivergedError as error:
            diverged[label] = str(error)
            continue
        results.append(run.result)
        listener.on_result(run.result)
    rows = tabulate(results)
    lines = {name: chosen.to_toml({}).splitlines() for name, chosen in settings.items()}
    content = {"settings": lines, "rows": rows, "diverged": diverged}
    write_atomically(out / "comparison.json", as_json(content))
    return rows, diverged


def tabulate(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per algorithm: mean and standard deviation over seeds of every metric."""
    rows = []
    for name in dict.fromkeys(r["algorithm"] for r in results):
        group = [r for r in results if r["algorithm"] == name]
        row: dict[str, Any] = {"algorithm": name, "seeds": [r["seed"] for r in group]}
        row["keeps"] = group[0].get("keeps", "")
        for task in ("global", "personalised", "holdout_global", "holdout_personalised"):
            metrics = [_task(r, task) for r in group]
            if all(values is not None for values in metrics):
                columns = {key: [values[key] for values in metrics] for key in metrics[0]}
                row[task] = {key: _spread(column) for key, column in columns.items()}
        row["seconds"] = statistics.fmean(r["seconds"]["train"] for r in group)
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation}


def _task(result: dict[str, Any], task: str) -> Any:
    if task.startswith("holdout_"):
        return result["holdout"] and result["holdout"][task.removeprefix("holdout_")]
    return result[task]
