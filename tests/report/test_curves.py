"""Learning curves: runs are averaged round by round, and every curve says what it is."""

from __future__ import annotations

import json
import shutil

import finished
import numpy as np
import pytest
from pages import changed, data_of

from fedhb.report import curves, run_data
from fedhb.report.page import write


def test_curves_are_those_of_the_runs(compared, page):
    rounds = [
        [
            json.loads(line)
            for line in (compared / f"niw-seed{k}/rounds.jsonl").read_text().splitlines()
        ]
        for k in (0, 1)
    ]
    mean = next(s for s in data_of(page)["plots"][0]["series"] if s["name"] == "niw")
    assert mean["y"] == pytest.approx(
        [(a["loss"] + b["loss"]) / 2 for a, b in zip(*rounds, strict=True)], rel=1e-4
    )
    sent = np.cumsum([r["down_bytes"] + r["up_bytes"] for r in rounds[0]]) / 1e6
    assert mean["x"]["sent"] == pytest.approx(sent, rel=1e-4) and mean["x"]["round"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_rounds_that_do_not_say_what_was_sent_have_their_curves(compared, tmp_path):
    shutil.copytree(compared / "niw-seed0", tmp_path / "r")
    changed(tmp_path / "r", "rounds.jsonl", lambda found: found.pop("down_bytes"))
    write([tmp_path / "r"], tmp_path / "p.html")
    assert "curve-loss" in {
        plot["id"] for plot in data_of((tmp_path / "p.html").read_text())["plots"]
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return finished.one(tmp_path_factory.mktemp("source") / "r", "fedavg", rounds=1)


def with_rounds(source, path, seed, rounds, **more):
    """A run that has so far recorded these rounds, with the round's number as loss."""
    path.mkdir(parents=True)
    record = json.loads((source / "rounds.jsonl").read_text().splitlines()[0])
    (path / "settings.toml").write_text(
        (source / "settings.toml").read_text().replace("seed = 0", f"seed = {seed}")
    )
    (path / "problem.json").write_text((source / "problem.json").read_text())
    lines = [
        record | {"round": k, "loss": float(k), "down_bytes": 10**6, "up_bytes": 0} | more
        for k in rounds
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_of_different_lengths_are_averaged_by_round(source, tmp_path):
    none = with_rounds(source, tmp_path / "a", 0, [])
    long = with_rounds(source, tmp_path / "b", 1, range(1, 1001))
    short = with_rounds(source, tmp_path / "c", 2, range(1, 600))
    late = with_rounds(source, tmp_path / "d", 3, range(500, 601))
    (method,) = run_data.read([none, long, short, late])
    *runs, mean = curves.method_lines(method, "loss")
    assert [line.name for line in runs] == [
        "fedavg, seed 1",
        "fedavg, seed 2",
        "fedavg, seed 3",
    ] and mean.name == "fedavg"
    for line in (*runs, mean):
        assert list(line.y) == line.x["round"]  # what was recorded of a round is shown at it
    assert mean.x["round"][0] == 1 and mean.x["round"][-1] == 1000 and len(mean.x["round"]) <= 641
    assert [line.x["round"][-1] for line in runs] == [1000, 599, 600]
    assert runs[1].x["sent"] == runs[1].x["round"]  # a megabyte a round


def titles(*paths):
    return {
        plot["id"]: (plot["title"], plot["y"]["percent"])
        for plot in curves.plots(run_data.read(paths))
    }


def test_a_score_is_called_what_it_is(source, tmp_path):
    classes = with_rounds(
        source, tmp_path / "a", 0, [1, 2]
    )  # not evaluated: no result tells that these are accuracies
    assert titles(classes)["curve-score"] == ("Accuracy", True) and "curve-error" not in titles(
        classes
    )
    sites = finished.regression(tmp_path / "b/r")
    assert titles(sites)["curve-error"] == ("Squared error", False)
    both = titles(classes, sites)
    assert both["curve-score"] == ("Accuracy", True) and both["curve-error"] == (
        "Squared error",
        False,
    )
    (classes / "problem.json").unlink()
    assert titles(classes)["curve-other"] == ("Score", False)
    (source / "problem.json").rename(source / "kept")
    assert titles(source)["curve-score"] == (
        "Accuracy",
        True,
    )  # of an older version: by its metrics
    (source / "kept").rename(source / "problem.json")
