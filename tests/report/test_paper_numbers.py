"""The paper's numbers beside a run that is one of its cells."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedhb.report import run_data
from fedhb.runs.settings import Settings
from fedhb_paper import printed


def paper_run(**changes):
    """A run of a cell of the paper, or one with other settings, before its first round."""
    cell = {
        "dataset": "fashion-mnist",
        "num_clients": 100,
        "shards_per_client": 5,
        "fraction": 0.1,
        "rounds": 100,
    }
    flags = {"algorithm": "niw"}
    settings = tomllib.loads(Settings.resolve(cell | changes, flags).to_toml({}))
    return run_data.RunData(Path("r"), settings, "", [], None, None)


def test_a_cell_of_the_paper_is_recognised():
    place = printed.folder()
    for run in (paper_run(), paper_run(unseen="mnist", seed=3, partition="shards", lr=0.5)):
        where, numbers = printed.numbers(run.algorithm, run.settings)
        row = next(
            r
            for r in (place / "all_mnist/printed.csv").read_text().splitlines()
            if r.startswith("fashion-mnist tau=1,niw,global,accuracy")
        )
        assert "fashion-mnist tau=1" in where
        assert numbers["global", "accuracy"][0] == pytest.approx(float(row.split(",")[4]) / 100)


@pytest.mark.parametrize(
    "changes",
    [
        {"local_epochs": 3},
        {"partition": "iid"},
        {"unseen": "9"},
        {"data": "my.npz"},
        {"model": "convnet"},
        {"model": {"hidden": 128}},
        {"validation": 0.2},
        {"evaluate_on": "validation", "validation": 0.2},
        {"holdout_clients": 10},
        {"dp_noise": 1.0},
        {"defence": "default"},
        {"schedule": "constant"},
        {"batch_norm": "batch"},
        {"server_share": 0.1},
    ],
    ids=str,
)
def test_a_run_by_other_settings_is_no_cell_of_the_paper(changes):
    assert printed.numbers("niw", paper_run(**changes).settings) == ("", {})


def test_the_paper_has_no_numbers_of_the_learned_model():
    assert printed.numbers("empirical-bayes", paper_run().settings) == ("", {})


def test_a_run_that_has_no_such_settings_is_no_cell_of_the_paper():
    run = paper_run()
    run.settings["algorithm"] = "mine"
    assert printed.numbers(run.algorithm, run.settings) == ("", {})
