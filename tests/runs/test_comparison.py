"""Several runs as one comparison."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedhb.runs.comparison import tabulate


def result(algorithm: str, seed: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    metrics = None if accuracy is None else {"accuracy": accuracy}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "global": metrics,
        "personalised": metrics,
        "holdout": None,
        "seconds": {"train": 2.0 * (seed + 1)},
    } | more


def test_a_row_has_the_mean_and_deviation_over_seeds():
    (row,) = tabulate([result("niw", 0, 0.5), result("niw", 1, 0.7)])
    assert row["seeds"] == [0, 1] and row["seconds"] == 3.0
    assert row["global"]["accuracy"]["mean"] == pytest.approx(0.6)
    assert row["global"]["accuracy"]["std"] == pytest.approx(math.sqrt(0.02))
    assert "holdout_global" not in row


def test_one_seed_has_no_deviation_and_algorithms_keep_their_order():
    rows = tabulate([result("niw", 0, 0.5), result("fedavg", 0, 0.4)])
    assert [row["algorithm"] for row in rows] == ["niw", "fedavg"]
    assert rows[0]["global"]["accuracy"] == {"mean": 0.5, "std": 0.0}


def test_a_task_that_one_run_did_not_evaluate_has_no_mean():
    held = {"holdout": {"global": {"accuracy": 0.3}, "personalised": {"accuracy": 0.9}}}
    (row,) = tabulate([result("niw", 0, 0.5, **held), result("niw", 1, None, **held)])
    assert "global" not in row and "personalised" not in row
    assert row["holdout_personalised"]["accuracy"]["mean"] == pytest.approx(0.9)
