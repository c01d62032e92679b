"""The paper's numbers for a run that is one of the paper's cells.

The federation, network and evaluation of the run are then the cell's. Settings of the method itself
(learning rates, its own table) may differ, as our defaults do, unless the paper compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.report.paper_numbers import Printed
from fedhb.runs.run_grid import flat, settings_of
from fedhb.runs.settings import TRAINING, Settings
from fedhb_paper import experiments
from fedhb_paper.experiments import Experiment

OF_THE_RUN = ("seed", "algorithm", "unseen", *TRAINING)
"""The settings in which runs of one cell may differ.

`unseen` changes a run only where it is a class, which is left out.
"""


def folder() -> Path | None:
    """Return the folder of the experiments: from here upward, else beside the code.

    In an installation without them it is None.
    """
    try:
        return experiments.find_folder(None)
    except InputError:
        beside = Path(__file__).parents[2] / "experiments"
        return beside if beside.is_dir() else None


def numbers(algorithm: str, settings: Mapping[str, Any]) -> tuple[str, Printed]:
    """Return the cell that a run is, in words, and the numbers that the paper prints for it.

    Both are empty where the run is no cell of the paper.
    """
    try:
        chosen = Settings.resolve(settings, {})
        ours = federation(chosen)
    except InputError:  # of another version, or of an algorithm of one's own
        return "", {}
    if chosen.data.file or chosen.evaluation.unseen.isdecimal():
        return "", {}
    place = folder()
    for name in experiments.names(place) if place is not None else []:
        assert place is not None
        experiment = experiments.load(place, name)
        if experiment.settings.get("kind") != "table" or not (printed := experiment.printed()):
            continue
        for cell in experiment.settings.get("cells", {}):
            for variant in experiment.settings["variants"]:
                rows = [
                    row for row in printed if (row["cell"], row["algorithm"]) == (cell, variant)
                ]
                if (
                    rows
                    and _is_variant(algorithm, settings, experiment, variant)
                    and _is_cell(ours, experiment, cell, variant)
                ):
                    return f"{experiment.title}: {cell}", {
                        (row["task"], row["metric"]): _value(row) for row in rows
                    }
    return "", {}


def federation(chosen: Settings) -> dict[str, Any]:
    """Return everything that a record of these settings depends on, without the method's."""
    values = {
        name: value
        for name, value in flat(chosen).items()
        if name not in OF_THE_RUN and name.partition(".")[0] in ("model", name)
    }
    partition = chosen.data.partition
    return values | {"partition": partition if partition != "shards" else ""}


def _is_cell(ours: dict[str, Any], experiment: Experiment, cell: str, variant: str) -> bool:
    try:
        return ours == federation(
            settings_of(experiment.settings, {"cell": cell, "variant": variant, "seed": 0})
        )
    except InputError:  # a cell of more than settings
        return False


def _is_variant(
    name: str, settings: Mapping[str, Any], experiment: Experiment, variant: str
) -> bool:
    changes = experiment.settings["variants"][variant]
    algorithm = changes.get("algorithm", variant)
    if algorithm != name:
        return False
    given: dict[str, Any] = settings.get(algorithm, {})
    wanted: dict[str, Any] = changes.get(algorithm, {})
    others = {
        key
        for overrides in experiment.settings["variants"].values()
        for key in overrides.get(algorithm, {})
    }
    from fedhb.algorithms import build

    chosen = vars(build(algorithm, given))
    default = vars(build(algorithm))
    return all(chosen.get(key) == wanted.get(key, default.get(key)) for key in others)


def _value(row: dict[str, Any]) -> tuple[float, float | None]:
    scale = 0.01 if row["metric"] == "accuracy" else 1.0  # accuracies are printed in per cent
    return row["mean"] * scale, row["std"] * scale if row["std"] is not None else None
