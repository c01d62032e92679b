"""The command line's contract: its files, its exit codes, and messages that name the value and the
remedy.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from command_line import SMALL

import fedhb.engine.loop
from fedhb.runs.settings import Settings

RESULT_KEYS = {
    "algorithm",
    "keeps",
    "dataset",
    "seed",
    "rounds",
    "split",
    "global",
    "personalised",
    "holdout",
    "per_client",
}
RESULT_KEYS |= {"communication", "data", "executor", "seconds"}


def test_train_writes_what_the_design_says(run, tmp_path):
    code, printed = run(
        "train", *SMALL, "--algorithm", "fedavg", "--seed", 7, "--out", "x", "--holdout-clients", 2
    )
    assert code == 0
    assert "novel" in printed
    result = json.loads((tmp_path / "x/result.json").read_text())
    assert set(result) == RESULT_KEYS
    assert (result["algorithm"], result["dataset"], result["seed"], result["rounds"]) == (
        "fedavg",
        "digits",
        7,
        4,
    )
    assert (
        set(result["global"])
        == {"accuracy", "nll", "brier", "ece"}
        == set(result["holdout"]["personalised"])
    )
    assert len(result["per_client"]["global_accuracy"]) == 8
    assert result["global"]["accuracy"] == pytest.approx(
        np.mean(result["per_client"]["global_accuracy"])
    )
    lines = (tmp_path / "x/rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    assert Settings.resolve(tmp_path / "x/settings.toml", {}).seed == 7
    assert not list((tmp_path / "x").rglob("*.pkl"))


def test_an_output_folder_that_holds_a_run_is_refused_then_resumed(run, tmp_path):
    assert run("train", *SMALL, "--out", "x", "--resume")[0] == 0  # nothing there: it starts
    before = (tmp_path / "x/result.json").read_bytes()
    code, printed = run("train", *SMALL, "--out", "x")
    assert code == 2 and "--resume" in printed
    code, printed = run("train", *SMALL, "--out", "x", "--resume")
    assert code == 0 and "finished" in printed
    code, printed = run("train", *SMALL, "--out", "x", "--resume", "--lr", "0.2")
    assert code == 2 and "lr=0.2" in printed
    assert (tmp_path / "x/result.json").read_bytes() == before


def test_ctrl_c_exits_130_says_how_to_go_on_and_loses_nothing(run, tmp_path, monkeypatch):
    assert run("train", *SMALL, "--out", "whole")[0] == 0
    real, calls = fedhb.engine.loop.one_exchange, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(fedhb.engine.loop, "one_exchange", interrupted)
    code, printed = run("train", *SMALL, "--out", "x")
    assert code == 130 and "--resume" in printed
    monkeypatch.setattr(fedhb.engine.loop, "one_exchange", real)
    assert run("train", *SMALL, "--out", "x", "--resume")[0] == 0
    whole, resumed = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "x")
    )
    assert whole["global"] == resumed["global"] and whole["personalised"] == resumed["personalised"]
    assert [
        json.loads(line)["round"] for line in (tmp_path / "x/rounds.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]


def test_lists(run):
    code, printed = run("algorithms")
    assert code == 0 and all(
        word in printed
        for word in (
            "empirical-bayes",
            "mixture",
            "fedavg",
            "fedprox",
            "fedbabu",
            "kl_weight",
            "sigma2",
        )
    )
    code, printed = run("data")
    assert code == 0 and "digits" in printed and "fedhb data get" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "empirical-bayes.kl_wait=1"], ["empirical-bayes", "'kl_wait'", "'kl_weight'"]),
        (["--set", "nope.x=1"], ["'nope'", "empirical-bayes"]),
        (["--set", "empirical-bayes"], ["TABLE.KEY=VALUE"]),
        (["--set", "fedavg.nosuch=3"], ["'fedavg.nosuch=3'", "empirical-bayes"]),
        (["--device", "meta"], ["device='meta'", "cpu"]),
        (["--batch-size", "9" * 25], ["batch_size=9999"]),
        (["--dp-noise", "1", "--out", "/proc/nowhere"], ["/proc/nowhere"]),
        (["--algorithm", "niw", "--set", "niw.dof=half"], ["niw.dof='half'", "per_coordinate"]),
        (["--algorithm", "nwi"], ["'nwi'", "'niw'"]),
        (["--dataset", "digit"], ["'digit'", "digits"]),
        (["--fraction", "1.5"], ["fraction=1.5"]),
        (["--rounds", "0"], ["rounds=0"]),
        (["--lr", "-1"], ["lr=-1"]),
        (["--num-clients", "100000"], ["100000"]),
        (["--holdout-clients", "10"], ["holdout_clients=10"]),
        (["--partition", "dirichlet", "--alpha", "0"], ["alpha=0"]),
        (["--model", "nowhere:factory"], ["'nowhere:factory'", "pkg.mod:factory"]),
        (["--model", "mobilenet"], ["'mobilenet'", "'hidden'"]),
        (["--set", "model.hidden=-1"], ["hidden=-1"]),
        (
            ["--set", f"model.hidden={2**50}"],
            ["'mlp'", "hidden=1125899906842624"],
        ),
        (["--model", "convnot"], ["'convnot'", "convnet", "pkg.mod:factory"]),
        (["--evaluate-on", "validation"], ["validation"]),
        (["--data", "missing.npz"], ["missing.npz"]),
        (["missing.toml"], ["missing.toml"]),
    ],
)
def test_bad_input_exits_2_and_writes_nothing(run, tmp_path, arguments, says):
    code, printed = run("train", *SMALL, "--out", "x", *arguments)
    assert code == 2
    for word in says:
        assert word in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "x").exists()


def test_bad_data_files(run, tmp_path, monkeypatch):
    x = np.zeros((20, 3), np.float32)
    x[7, 1] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.arange(20) % 2)
    code, printed = run("train", "--data", "nan.npz", "--out", "x")
    assert code == 2 and "row 7" in printed
    np.savez(tmp_path / "label.npz", x=np.zeros((20, 3), np.float32), y=np.arange(20) - 1)
    code, printed = run("train", "--data", "label.npz", "--out", "x")
    assert code == 2 and "-1" in printed
    (tmp_path / "cut.npz").write_bytes((tmp_path / "nan.npz").read_bytes()[:100])
    code, printed = run("train", "--data", "cut.npz", "--out", "x")
    assert code == 2 and "cut.npz" in printed

    monkeypatch.setenv("FEDHB_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, printed = run("train", "--dataset", "mnist", "--out", "x")
    assert code == 2 and "train-images-idx3-ubyte" in printed and "fedhb data get mnist" in printed
    folder = tmp_path / "nowhere/mnist"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03\0\0\0\x05"))
    code, printed = run("train", "--dataset", "mnist", "--out", "x")
    assert code == 2 and "train-images" in printed
    assert not (tmp_path / "x").exists()


def test_divergence_is_a_failure(run, tmp_path):
    code, printed = run("train", *SMALL, "--algorithm", "fedavg", "--lr", "1e30", "--out", "x")
    assert code == 1 and "learning rate" in printed


def test_the_installed_command():
    """As a user starts it: a fresh interpreter."""
    ended = subprocess.run(
        [sys.executable, "-m", "fedhb", "algorithms"], capture_output=True, text=True, check=True
    )
    assert "empirical-bayes" in ended.stdout


def test_what_is_spent_of_privacy_is_told(run, tmp_path):
    assert "epsilon " in run("train", *SMALL, "--dp-noise", 1, "--out", "x")[1]
