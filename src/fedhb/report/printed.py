"""The paper's numbers for a run that is one of the paper's cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.paper import experiments
from fedhb.paper.cells import CHOOSING
from fedhb.paper.experiments import Experiment
from fedhb.report.collect import RunData
from fedhb.settings import Settings

Printed = dict[tuple[str, str], tuple[float, float | None]]
"""(task, metric) -> mean and deviation, in the units of a result."""

FEDERATION = ("dataset", "num_clients", "shards_per_client", "fraction", "local_epochs", "rounds", "max_examples", "batch_size")


def folder() -> Path | None:
    """The folder of the experiments: from here upward, else beside the code; None in an installation without them."""
    try:
        return experiments.find_folder(None)
    except InputError:
        beside = Path(__file__).parents[3] / "experiments"
        return beside if beside.is_dir() else None


def numbers(run: RunData, place: Path | None) -> tuple[str, Printed]:
    """Which cell of which table the run is, in words, and what the paper prints for it; nothing where it is none."""
    for name in experiments.names(place) if place is not None else []:
        assert place is not None
        experiment = experiments.load(place, name)
        if experiment.settings.get("kind") != "table" or not (printed := experiment.printed()):
            continue
        for cell in experiment.settings.get("cells", {}):
            if not _is_cell(run, experiment, cell):
                continue
            for variant in experiment.settings["variants"]:
                rows = [row for row in printed if (row["cell"], row["algorithm"]) == (cell, variant)]
                if rows and _is_variant(run, experiment, variant):
                    return f"{experiment.title}: {cell}", {(row["task"], row["metric"]): _value(row) for row in rows}
    return "", {}


def _is_cell(run: RunData, experiment: Experiment, cell: str) -> bool:
    """Whether the run's federation is that of the cell, the defaults filled in on both sides."""
    wanted = {**experiment.settings.get("common", {}), **experiment.settings["cells"][cell]}
    plain = {key: value for key, value in wanted.items() if not isinstance(value, dict) and key not in CHOOSING}
    if set(plain) - set(Settings.__dataclass_fields__):
        return False
    theirs = Settings(**plain)
    ours = run.settings
    if ours.get("data") or str(ours.get("unseen", "")).isdecimal() or ours.get("partition", "") not in ("", "shards"):
        return False
    return all(ours.get(key, getattr(Settings, key)) == getattr(theirs, key) for key in FEDERATION)


def _is_variant(run: RunData, experiment: Experiment, variant: str) -> bool:
    changes = experiment.settings["variants"][variant]
    algorithm = changes.get("algorithm", variant)
    if algorithm != run.algorithm:
        return False
    own: dict[str, Any] = run.settings.get(algorithm, {})
    wanted: dict[str, Any] = changes.get(algorithm, {})
    others = {key for one in experiment.settings["variants"].values() for key in one.get(algorithm, {})}
    from fedhb.algorithms import build

    chosen = vars(build(algorithm, own))
    default = vars(build(algorithm))
    return all(chosen.get(key) == wanted.get(key, default.get(key)) for key in others)


def _value(row: dict[str, Any]) -> tuple[float, float | None]:
    scale = 0.01 if row["metric"] == "accuracy" else 1.0  # accuracies are printed in per cent
    return row["mean"] * scale, row["std"] * scale if row["std"] is not None else None
