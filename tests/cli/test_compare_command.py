"""`fedhb compare`: several algorithms and seeds under the same settings."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from command_line import SMALL

from fedhb.algorithms import EmpiricalBayes, FedBABU
from fedhb.runs.settings import Settings


def test_train_and_compare_give_each_algorithm_its_own_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr(EmpiricalBayes, "training", {})
    monkeypatch.setattr(FedBABU, "training", {"lr": 0.02})
    assert run("train", *SMALL, "--algorithm", "fedbabu", "--out", "t")[0] == 0
    assert (
        run(
            "compare",
            *SMALL,
            "--algorithms",
            "empirical-bayes,fedbabu",
            "--seeds",
            "0",
            "--out",
            "c",
        )[0]
        == 0
    )
    assert (
        run(
            "compare",
            *SMALL,
            "--algorithms",
            "empirical-bayes,fedbabu",
            "--seeds",
            "0",
            "--lr",
            "0.1",
            "--out",
            "d",
        )[0]
        == 0
    )
    found = {
        name: Settings.resolve(tmp_path / name / "settings.toml", {}).training.lr
        for name in ("t", "c/empirical-bayes-seed0", "c/fedbabu-seed0")
    }
    assert found == {"t": 0.02, "c/empirical-bayes-seed0": 0.1, "c/fedbabu-seed0": 0.02}
    t, c, d = (
        json.loads((tmp_path / n / "result.json").read_text())
        for n in ("t", "c/fedbabu-seed0", "d/fedbabu-seed0")
    )
    assert t["global"] == c["global"] != d["global"]


def test_a_run_that_diverges_does_not_keep_the_others_from_being_run(run, tmp_path):
    code, printed = run(
        "compare", *SMALL, "--lr", "1e30", "--algorithms", "fedavg", "--seeds", "0", "--out", "none"
    )
    assert code == 1 and "diverged" in printed
    (tmp_path / "own").mkdir()
    (tmp_path / "own/chosen.toml").write_text(
        "[fedavg.training]\nlr = 1e30\n[fedavg.settings]\n[fedbabu.training]\nlr = 0.1\n[fedbabu.settings]\n"
    )
    order = [
        "--algorithms",
        "fedavg,fedbabu",
        "--seeds",
        "0,1",
        "--tuned",
        "own/chosen.toml",
        "--out",
        "c",
    ]
    for more in ([], ["--resume"]):
        code, printed = run("compare", *SMALL, *order, *more)
        assert code == 1 and "fedavg-seed0" in printed and "2 of 4" in printed
        kept = json.loads((tmp_path / "c/comparison.json").read_text())
        assert [row["algorithm"] for row in kept["rows"]] == ["fedbabu"] and kept["rows"][0][
            "seeds"
        ] == [0, 1]
        assert set(kept["diverged"]) == {"fedavg-seed0", "fedavg-seed1"}


def test_compare_predict_personalise(run, tmp_path):
    code, printed = run(
        "compare", *SMALL, "--algorithms", "empirical-bayes,fedbabu", "--seeds", "0,1", "--out", "c"
    )
    assert code == 0
    for word in ("empirical-bayes", "fedbabu", "global accuracy", "personalised ece", "±"):
        assert word.split()[0] in printed
    rows = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    mine = [
        json.loads((tmp_path / f"c/empirical-bayes-seed{s}/result.json").read_text())["global"][
            "accuracy"
        ]
        for s in (0, 1)
    ]
    assert rows[0]["global"]["accuracy"] == {
        "mean": pytest.approx(np.mean(mine)),
        "std": pytest.approx(np.std(mine, ddof=1)),
    }
    code, printed = run(
        "compare", *SMALL, "--algorithms", "empirical-bayes,fedbabu", "--seeds", "0,1", "--out", "c"
    )
    assert code == 2 and "--resume" in printed

    rng = np.random.default_rng(0)
    x = rng.integers(0, 17, (30, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "mine.npz", x=x, y=rng.integers(0, 10, 30), split=np.arange(30) % 3 == 0)
    assert run("predict", "c/empirical-bayes-seed0", "x.npy")[0] == 0
    saved = np.load(tmp_path / "x.predictions.npz")
    assert saved["probabilities"].shape == (30, 10) and saved["entropy"].shape == (30,)
    assert np.allclose(saved["probabilities"].sum(1), 1, atol=1e-5)
    code, printed = run(
        "personalise", "c/empirical-bayes-seed0", "--data", "mine.npz", "--out", "me"
    )
    assert code == 0 and "20 examples" in printed and "10 test examples" in printed
    assert run("predict", "me", "x.npy", "--out", "me.npz")[0] == 0
    assert not np.allclose(np.load(tmp_path / "me.npz")["probabilities"], saved["probabilities"])
    code, printed = run("personalise", "me", "--data", "mine.npz")
    assert code == 2 and "personalised" in printed


def test_a_finished_run_is_evaluated_again_where_it_is_asked_otherwise(run, tmp_path):
    assert run("compare", *SMALL, "--algorithms", "fedavg", "--seeds", "0", "--out", "c")[0] == 0
    code, printed = run(
        "compare",
        *SMALL,
        "--algorithms",
        "fedavg",
        "--seeds",
        "0",
        "--out",
        "c",
        "--resume",
        "--personal-lr",
        "0.5",
    )
    assert code == 0
    assert (
        run("train", *SMALL, "--algorithm", "fedavg", "--personal-lr", "0.5", "--out", "x")[0] == 0
    )
    fresh = json.loads((tmp_path / "x/result.json").read_text())["personalised"]["accuracy"]
    table = json.loads((tmp_path / "c/comparison.json").read_text())
    assert (
        table["rows"][0]["personalised"]["accuracy"]["mean"] == fresh
        and "personal_lr = 0.5" in table["settings"]["fedavg"]
    )
    code, printed = run(
        "train", *SMALL, "--algorithm", "fedavg", "--personal-lr", "0.1", "--out", "x", "--resume"
    )
    assert code == 0 and "finished" not in printed
    assert (
        "finished"
        in run(
            "train",
            *SMALL,
            "--algorithm",
            "fedavg",
            "--personal-lr",
            "0.1",
            "--out",
            "x",
            "--resume",
        )[1]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds=0,-1"], "seed=-1"),
        (["--seeds", ""], "seeds=''"),
        (["--algorithms", ""], "algorithms=''"),
        (
            ["--set", "fedprox.mu=3"],
            "fedprox.*--algorithms",
        ),
        (
            ["--algorithms", "fedavg,local", "--defence", "default"],
            "local",
        ),
        (
            ["--algorithms", "fedavg,fedpa", "--dp-noise", "1"],
            "fedpa",
        ),
    ],
)
def test_a_comparison_that_must_fail_fails_before_its_first_run(run, tmp_path, arguments, says):
    code, printed = run("compare", *SMALL, "--algorithms", "fedavg", "--out", "c", *arguments)
    assert code == 2 and re.search(says, printed) and not (tmp_path / "c").exists()


def test_a_comparison_leaves_out_the_algorithm_and_seed_of_a_runs_own_file(run, tmp_path):
    """Such a file is how one run is compared with others under the same settings; lists of its own
    it may have.
    """
    assert (
        run(
            "train",
            *SMALL,
            "--algorithm",
            "fedprox",
            "--set",
            "fedprox.mu=3",
            "--seed",
            7,
            "--out",
            "x",
        )[0]
        == 0
    )
    assert (
        run(
            "compare",
            "x/settings.toml",
            "--algorithms",
            "fedavg,fedprox",
            "--seeds",
            "1",
            "--out",
            "c",
        )[0]
        == 0
    )
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "comparison.json",
        "fedavg-seed1",
        "fedprox-seed1",
    ]
    lists = 'algorithms = ["fedavg"]\nseeds = [2]\n'
    (tmp_path / "s.toml").write_text(lists + (tmp_path / "x/settings.toml").read_text())
    assert run("compare", "s.toml", "--set", "fedavg.update=body", "--out", "d")[0] == 0
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "comparison.json",
        "fedavg-seed2",
    ]


@pytest.mark.parametrize(
    "command",
    [["train", "--algorithm", "fedavg"], ["compare", "--algorithms", "fedavg", "--seeds", "0"]],
)
def test_data_without_test_examples_are_trained_on_and_it_is_said(run, tmp_path, command):
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(
        tmp_path / "own.npz",
        x=x,
        y=np.arange(40) % 2,
        client=np.arange(40) % 4,
        split=np.zeros(40, int),
    )
    code, printed = run(
        *command, "--data", "own.npz", "--rounds", "1", "--fraction", "1", "--out", "x"
    )
    assert code == 0 and "no test examples" in printed
    assert command[0] == "train" or "fedavg seed 0" in printed
