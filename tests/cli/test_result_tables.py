"""The tables of results that the terminal shows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fedhb.cli.result_tables import comparison_table


def test_a_mean_over_some_clients_alone_says_so(run, tmp_path):
    """A client with a single row keeps it for training."""
    owner = [0] * 20 + [1] + [2] * 20
    np.savez(
        tmp_path / "own.npz",
        x=np.random.default_rng(0).normal(size=(41, 3)),
        y=np.arange(41) % 2,
        client=owner,
    )
    code, printed = run(
        "train",
        "--algorithm",
        "fedavg",
        "--data",
        "own.npz",
        "--rounds",
        "1",
        "--fraction",
        "1",
        "--out",
        "x",
    )
    assert code == 0 and "2 of 3 clients" in " ".join(printed.split())
    assert (
        json.loads((tmp_path / "x/result.json").read_text())["per_client"]["global_accuracy"][1]
        is None
    )
    code, printed = run("report", "x", "--out", "r.html")
    assert code == 0


def test_the_best_coverage_is_the_one_nearest_to_its_level():
    def row(name: str, coverage: float) -> dict[str, Any]:
        return {
            "algorithm": name,
            "keeps": "heads" if name == "fedpop" else "",
            "seeds": [0],
            "seconds": 1.0,
            "global": {"coverage": {"mean": coverage, "std": 0.0}},
        }

    cells = list(
        comparison_table([row("a", 1.0), row("b", 0.91), row("c", 0.5)], "").columns[1].cells
    )
    assert cells == ["1.0000", "[bold]0.9100[/bold]", "0.5000"]


def test_a_personal_model_is_not_the_best_global_prediction():
    def row(name: str, accuracy: float) -> dict[str, Any]:
        metrics = {"accuracy": {"mean": accuracy, "std": 0.0}}
        return {
            "algorithm": name,
            "keeps": "heads" if name == "fedpop" else "",
            "seeds": [0],
            "seconds": 1.0,
            "global": metrics,
            "personalised": metrics,
        }

    table = comparison_table([row("fedpop", 0.9), row("empirical-bayes", 0.8)], "")
    assert list(table.columns[1].cells) == ["0.9000", "[bold]0.8000[/bold]"]
    assert list(table.columns[2].cells) == ["[bold]0.9000[/bold]", "0.8000"]
    assert "fedpop" in str(table.caption)
    assert comparison_table([row("empirical-bayes", 0.8)], "").caption is None
