"""The command line's contract: its files, its exit codes, and messages that name the value and the remedy."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import fedhb.engine.loop
from fedhb.algorithms import NIW, FedBABU
from fedhb.cli import main
from fedhb.cli.result_tables import comparison_table
from fedhb.errors import InputError
from fedhb.network.factory import make_model
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings

SMALL = [
    "--num-clients",
    "10",
    "--shards-per-client",
    "3",
    "--fraction",
    "0.5",
    "--rounds",
    "4",
    "--checkpoint-every",
    "2",
]
SMALL += ["--set", "model.hidden=16", "--batch-size", "20", "--personal-epochs", "1"]
RESULT_KEYS = {
    "algorithm",
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


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    return command


def test_train_writes_what_the_design_says(run, tmp_path):
    code, printed = run(
        "train", *SMALL, "--algorithm", "fedavg", "--seed", 7, "--out", "x", "--holdout-clients", 2
    )
    assert code == 0
    assert "novel clients" in printed
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


def test_help_tells_every_default(run, monkeypatch):
    """Brackets are styles to rich: those with words in them would vanish."""
    monkeypatch.setenv("COLUMNS", "200")
    code, printed = run("train", "-h")
    assert code == 0 and "[]" not in printed
    for default in ("[digits]", "[niw]", "[step]", "[0.1]", "[runs/DATASET-ALGORITHM-seedN]"):
        assert default in printed
    assert (
        "[niw,mixture,fedavg]" in run("compare", "-h")[1]
        and "[DIR/run]" in run("deploy", "up", "-h")[1]
    )


def test_flags_override_the_file_and_the_resolved_file_gives_the_same_run(run, tmp_path):
    (tmp_path / "s.toml").write_text(
        'algorithm = "niw"\nrounds = 99\nseed = 3\n[niw]\nkl_weight = 0.01\n'
    )
    assert run("train", "s.toml", *SMALL, "--out", "a")[0] == 0
    assert run("train", "a/settings.toml", "--out", "b")[0] == 0
    a, b = (json.loads((tmp_path / name / "result.json").read_text()) for name in "ab")
    assert a["rounds"] == 4
    assert a["global"] == b["global"] and a["personalised"] == b["personalised"]
    assert (
        json.loads((tmp_path / "a/problem.json").read_text())["algorithm"]["settings"]["kl_weight"]
        == 0.01
    )


def test_an_output_folder_that_holds_a_run_is_refused_then_resumed(run, tmp_path):
    assert run("train", *SMALL, "--out", "x", "--resume")[0] == 0  # nothing there: it starts
    before = (tmp_path / "x/result.json").read_bytes()
    code, printed = run("train", *SMALL, "--out", "x")
    assert code == 2 and "x already holds a run" in printed and "--resume" in printed
    code, printed = run("train", *SMALL, "--out", "x", "--resume")
    assert code == 0 and "finished already" in printed
    code, printed = run("train", *SMALL, "--out", "x", "--resume", "--lr", "0.2")
    assert code == 2 and "another configuration" in printed
    assert (tmp_path / "x/result.json").read_bytes() == before


def test_ctrl_c_exits_130_says_how_to_go_on_and_loses_nothing(run, tmp_path, monkeypatch):
    assert run("train", *SMALL, "--out", "whole")[0] == 0
    real, calls = fedhb.engine.loop.one_round, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(fedhb.engine.loop, "one_round", interrupted)
    code, printed = run("train", *SMALL, "--out", "x")
    assert code == 130 and "--resume" in printed
    monkeypatch.setattr(fedhb.engine.loop, "one_round", real)
    assert run("train", *SMALL, "--out", "x", "--resume")[0] == 0
    whole, resumed = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "x")
    )
    assert whole["global"] == resumed["global"] and whole["personalised"] == resumed["personalised"]
    assert [
        json.loads(line)["round"] for line in (tmp_path / "x/rounds.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]


def test_train_and_compare_give_each_algorithm_its_own_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr(NIW, "training", {})
    monkeypatch.setattr(FedBABU, "training", {"lr": 0.02})
    assert run("train", *SMALL, "--algorithm", "fedbabu", "--out", "t")[0] == 0
    assert (
        run("compare", *SMALL, "--algorithms", "niw,fedbabu", "--seeds", "0", "--out", "c")[0] == 0
    )
    assert (
        run(
            "compare",
            *SMALL,
            "--algorithms",
            "niw,fedbabu",
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
        name: Settings.resolve(tmp_path / name / "settings.toml", {}).lr
        for name in ("t", "c/niw-seed0", "c/fedbabu-seed0")
    }
    assert found == {"t": 0.02, "c/niw-seed0": 0.1, "c/fedbabu-seed0": 0.02}
    t, c, d = (
        json.loads((tmp_path / n / "result.json").read_text())
        for n in ("t", "c/fedbabu-seed0", "d/fedbabu-seed0")
    )
    assert t["global"] == c["global"] != d["global"]


def test_a_run_that_diverges_does_not_keep_the_others_from_being_run(run, tmp_path):
    code, printed = run(
        "compare", *SMALL, "--lr", "1e30", "--algorithms", "fedavg", "--seeds", "0", "--out", "none"
    )
    assert code == 1 and "every run diverged" in printed
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
        assert code == 1 and "fedavg-seed0: round" in printed and "2 of 4 runs diverged" in printed
        kept = json.loads((tmp_path / "c/comparison.json").read_text())
        assert [row["algorithm"] for row in kept["rows"]] == ["fedbabu"] and kept["rows"][0][
            "seeds"
        ] == [0, 1]
        assert set(kept["diverged"]) == {"fedavg-seed0", "fedavg-seed1"}


def test_a_failed_prediction_leaves_the_last_one(run, tmp_path, monkeypatch):
    assert run("train", *SMALL, "--out", "x")[0] == 0
    np.save(tmp_path / "in.npy", fedhb.data.load("digits").test.x[:5])
    assert run("predict", "x", "in.npy", "--out", "p.npz")[0] == 0
    before = (tmp_path / "p.npz").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedhb.files.os.fsync", full)
    code, printed = run("predict", "x", "in.npy", "--out", "p.npz")
    assert code == 1 and "No space left" in printed
    assert (tmp_path / "p.npz").read_bytes() == before and sorted(
        p.name for p in tmp_path.glob("*p.npz*")
    ) == ["p.npz"]


def test_brackets_in_a_path_are_told(run, tmp_path):
    code, printed = run("train", *SMALL, "--out", "runs/[try 2]")
    assert code == 0 and "results in runs/[try 2]" in printed
    code, printed = run("report", "runs/[try 2]")
    assert code == 0 and "[try 2]" in printed


def test_compare_predict_personalise(run, tmp_path):
    code, printed = run(
        "compare", *SMALL, "--algorithms", "niw,fedbabu", "--seeds", "0,1", "--out", "c"
    )
    assert code == 0
    for word in ("niw", "fedbabu", "global accuracy", "personalised ece", "±"):
        assert word.split()[0] in printed
    rows = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    mine = [
        json.loads((tmp_path / f"c/niw-seed{s}/result.json").read_text())["global"]["accuracy"]
        for s in (0, 1)
    ]
    assert rows[0]["global"]["accuracy"] == {
        "mean": pytest.approx(np.mean(mine)),
        "std": pytest.approx(np.std(mine, ddof=1)),
    }
    code, printed = run(
        "compare", *SMALL, "--algorithms", "niw,fedbabu", "--seeds", "0,1", "--out", "c"
    )
    assert code == 2 and "--resume" in printed

    rng = np.random.default_rng(0)
    x = rng.integers(0, 17, (30, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "mine.npz", x=x, y=rng.integers(0, 10, 30), split=np.arange(30) % 3 == 0)
    assert run("predict", "c/niw-seed0", "x.npy")[0] == 0
    saved = np.load(tmp_path / "x.predictions.npz")
    assert saved["probabilities"].shape == (30, 10) and saved["entropy"].shape == (30,)
    assert np.allclose(saved["probabilities"].sum(1), 1, atol=1e-5)
    code, printed = run("personalise", "c/niw-seed0", "--data", "mine.npz", "--out", "me")
    assert code == 0 and "20 examples" in printed and "10 test examples" in printed
    assert run("predict", "me", "x.npy", "--out", "me.npz")[0] == 0
    assert not np.allclose(np.load(tmp_path / "me.npz")["probabilities"], saved["probabilities"])
    code, printed = run("personalise", "me", "--data", "mine.npz")
    assert code == 2 and "personalised model already" in printed


def test_lists(run):
    code, printed = run("algorithms")
    assert code == 0 and all(
        word in printed
        for word in ("niw", "mixture", "fedavg", "fedprox", "fedbabu", "kl_weight", "sigma2")
    )
    code, printed = run("data")
    assert code == 0 and "digits" in printed and "fedhb data get" in printed


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
    assert code == 0 and "finished already" not in printed
    assert (
        "finished already"
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
        (["--seeds", ""], "seeds='': give whole numbers"),
        (["--algorithms", ""], "algorithms='': name at least one"),
        (
            ["--set", "fedprox.mu=3"],
            "but the algorithms are fedavg: leave it out, or name fedprox in --algorithms",
        ),
        (
            ["--algorithms", "fedavg,local", "--defence", "default"],
            "local has no answers of clients to filter",
        ),
        (
            ["--algorithms", "fedavg,fedpa", "--dp-noise", "1"],
            "with fedpa: its sums are not averages",
        ),
    ],
)
def test_a_comparison_that_must_fail_fails_before_its_first_run(run, tmp_path, arguments, says):
    code, printed = run("compare", *SMALL, "--algorithms", "fedavg", "--out", "c", *arguments)
    assert code == 2 and says in printed and not (tmp_path / "c").exists()


@pytest.mark.parametrize(("flag", "value"), [("--algorithm", "niw"), ("--seed", "7")])
def test_a_comparison_has_no_flag_for_one_of_what_it_takes_several_of(run, tmp_path, flag, value):
    code, printed = run("compare", *SMALL, flag, value, "--out", "c")
    assert code == 2 and f"{flag}s" in printed and not (tmp_path / "c").exists()


def test_a_comparison_leaves_out_the_algorithm_and_seed_of_a_runs_own_file(run, tmp_path):
    """Such a file is how one run is compared with others under the same settings; lists of its own it may have."""
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
    assert code == 0 and "the clients have no test examples: nothing was evaluated" in printed
    assert command[0] == "train" or "fedavg seed 0: nothing was evaluated" in printed


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
    assert code == 0 and "mean over 2 of 3 clients, those with test data" in " ".join(
        printed.split()
    )
    assert (
        json.loads((tmp_path / "x/result.json").read_text())["per_client"]["global_accuracy"][1]
        is None
    )
    code, printed = run("report", "x", "--out", "r.html")
    assert code == 0


def test_a_seed_that_is_given_twice_counts_once(run, tmp_path):
    assert run("compare", *SMALL, "--algorithms", "fedavg", "--seeds", "3,3", "--out", "c")[0] == 0
    assert json.loads((tmp_path / "c/comparison.json").read_text())["rows"][0]["seeds"] == [3]


def test_the_best_coverage_is_the_one_nearest_to_its_level():
    def row(name: str, coverage: float) -> dict[str, Any]:
        return {
            "algorithm": name,
            "seeds": [0],
            "seconds": 1.0,
            "global": {"coverage": {"mean": coverage, "std": 0.0}},
        }

    cells = list(
        comparison_table([row("a", 1.0), row("b", 0.91), row("c", 0.5)], "").columns[1].cells
    )
    assert cells == ["1.0000", "[bold]0.9100[/bold]", "0.5000"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "--algorithms", "fedavg", "--out", "file"], "file is a file"),
        (["personalise", "x", "--data", "mine.npz", "--out", "file"], "file is a file"),
        (["personalise", "x", "--data", "bad.npz"], "labels lie in 42..42"),
        (["predict", "x", "x.npy", "--out", "no/p.npz"], "there is no folder no"),
        (["predict", "x", "x.npy", "--out", "x"], "it is a folder"),
        (["predict", "x", "none.npy"], "none.npy has no rows"),
        (["predict", "x", "one.npy"], "one.npy has no rows"),
        (["predict", "x", "."], "cannot read .: Is a directory"),
        (["predict", "x", ""], "cannot read .: Is a directory"),
        (["predict", "x", "x.npy"], ""),
        (["predict", "x", "x.npy", "--out", "preds"], "predictions in preds.npz"),
    ],
)
def test_where_results_go(trained, run, tmp_path, arguments, says):
    """What cannot be written to, and examples that make no sense, are told before the work, with code 2."""
    shutil.copytree(trained, tmp_path / "x")
    (tmp_path / "file").write_text("mine")
    x = np.zeros((3, 1, 8, 8))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "none.npy", x[:0])
    np.save(tmp_path / "one.npy", np.float32(1))
    np.savez(tmp_path / "mine.npz", x=x, y=np.array([0, 1, 2]))
    np.savez(tmp_path / "bad.npz", x=x, y=np.array([0, 1, 42]), split=np.array([0, 0, 1]))
    code, printed = run(*arguments)
    assert says in printed and "Traceback" not in printed
    assert code == (0 if "predictions in" in printed else 2)
    assert (tmp_path / "file").read_text() == "mine" and not (
        tmp_path / "x/personalised/bad"
    ).exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run to read."""
    out = tmp_path_factory.mktemp("trained") / "x"
    train(Settings(num_clients=10, rounds=1, algorithm="fedavg"), out, progress=False)
    return out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "niw.kl_wait=1"], ["niw", "'kl_wait'", "did you mean 'kl_weight'"]),
        (["--set", "nope.x=1"], ["'nope'", "choose from"]),
        (["--set", "niw"], ["TABLE.KEY=VALUE"]),
        (["--set", "fedavg.nosuch=3"], ["'fedavg.nosuch=3'", "the algorithm is niw"]),
        (["--device", "meta"], ["device='meta'", "use cpu"]),
        (["--batch-size", "9" * 25], ["batch_size=9999", "give at most"]),
        (["--dp-noise", "1", "--out", "/proc/nowhere"], ["cannot write to /proc/nowhere"]),
        (["--set", "niw.dof=half"], ["niw.dof='half'", "full or per_coordinate"]),
        (["--algorithm", "nwi"], ["'nwi'", "did you mean 'niw'"]),
        (["--dataset", "digit"], ["'digit'", "digits"]),
        (["--fraction", "1.5"], ["fraction=1.5"]),
        (["--rounds", "0"], ["rounds=0"]),
        (["--lr", "-1"], ["lr=-1"]),
        (["--num-clients", "100000"], ["100000"]),
        (["--holdout-clients", "10"], ["holdout_clients=10"]),
        (["--partition", "dirichlet", "--alpha", "0"], ["alpha=0"]),
        (["--model", "nowhere:factory"], ["'nowhere:factory'", "pkg.mod:factory"]),
        (["--model", "mobilenet"], ["'mobilenet'", "does not take these options", "'hidden'"]),
        (["--set", "model.hidden=-1"], ["hidden=-1", "at least 1"]),
        (
            ["--set", f"model.hidden={2**50}"],
            ["'mlp' cannot be made with hidden=1125899906842624", "choose other options"],
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--alpha", "0.3"],
            "alpha=0.3 has no effect: no partition is given; leave it out, or give --partition dirichlet",
        ),
        (
            ["--num-clients", "3"],
            "num_clients=3 has no effect: the data name their clients; leave it out, or give --part",
        ),
        (
            ["--shards-per-client", "2"],
            "shards_per_client=2 has no effect: the data name their clients",
        ),
        (
            ["--partition", "iid", "--shards-per-client", "2"],
            "shards_per_client=2 has no effect: the partition is iid",
        ),
        (
            ["--group-split", "group"],
            "group_split='group' has no effect: the data name their clients",
        ),
        (
            ["--dp-clip", "2"],
            "dp_clip=2.0 has no effect without noise: leave it out, or give --dp-noise",
        ),
        (["--dp-delta", "1e-6"], "dp_delta=1e-06 has no effect without noise"),
        (["--dataset", "digits"], "dataset='digits' has no effect beside data='own.npz'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_flag_that_changes_nothing_is_refused(run, tmp_path, command, arguments, says):
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) % 4)
    code, printed = run(command, "--data", "own.npz", "--rounds", "1", "--out", "x", *arguments)
    assert code == 2 and says in printed and not (tmp_path / "x").exists()


def test_what_changes_nothing_may_stand_in_a_file(run, tmp_path):
    """The file that a run keeps has every setting, and is a file of settings."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) % 4)
    assert (
        run("train", "--data", "own.npz", "--rounds", "1", "--fraction", "1", "--out", "x")[0] == 0
    )
    held = (tmp_path / "x/settings.toml").read_text()
    assert all(
        f"{name} = " in held
        for name in ("alpha", "num_clients", "shards_per_client", "dp_clip", "dataset")
    )
    assert run("train", "x/settings.toml", "--rounds", "2", "--out", "y")[0] == 0
    code, printed = run("train", "x/settings.toml", "--dataset", "digits", "--out", "z")
    assert code == 2 and "--data ''" in printed
    assert (
        run(
            "train",
            "x/settings.toml",
            "--data",
            "",
            "--dataset",
            "digits",
            "--num-clients",
            "5",
            "--out",
            "z",
        )[0]
        == 0
    )


def test_unknown_keys_in_a_file_are_errors(run, tmp_path):
    (tmp_path / "s.toml").write_text("learning_rate = 0.1\n")
    code, printed = run("train", "s.toml")
    assert code == 2 and "'learning_rate'" in printed
    (tmp_path / "s.toml").write_text("[[[")
    code, printed = run("train", "s.toml")
    assert code == 2 and "not a TOML file" in printed


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
    assert code == 1 and "lower the learning rate" in printed


def test_what_is_wrong_inside_a_factory_is_told_as_it_is(tmp_path, monkeypatch):
    """Its own errors, with their place: only a call that it does not take is the user's of the command."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mynets.py").write_text(
        "import torch\n"
        "def wrong(shape, outputs, depth=1):\n    return len(3)\n"
        "def right(shape, outputs, depth=1):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, outputs))\n"
    )
    with pytest.raises(TypeError, match="has no len"):
        make_model("mynets:wrong", (1, 8, 8), 10, {})
    with pytest.raises(
        InputError, match=r"model 'mynets:right' does not take these options .*'width'"
    ):
        make_model("mynets:right", (1, 8, 8), 10, {"width": 2})
    assert make_model("mynets:right", (1, 8, 8), 10, {"depth": 2})(
        torch.zeros(2, 1, 8, 8)
    ).shape == (2, 10)


def test_a_users_own_model_and_regression(run, tmp_path):
    (tmp_path / "mymodel.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, n, out, width):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(n, width), nn.Linear(width, out)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x).tanh())\n"
        "def factory(shape, outputs, width=8):\n"
        "    return Net(shape[0], outputs, width)\n"
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    np.savez(tmp_path / "t.npz", x=x, y=x.sum(1) + 100.0, client=np.arange(120) % 6)
    flags = [
        "--data",
        "t.npz",
        "--model",
        "mymodel:factory",
        "--rounds",
        "3",
        "--fraction",
        "0.5",
        "--lr",
        "0.01",
    ]
    assert run("train", *flags, "--set", "model.width=4", "--out", "x")[0] == 0
    result = json.loads((tmp_path / "x/result.json").read_text())
    assert set(result["global"]) == {"rmse", "nll", "coverage"}
    np.save(tmp_path / "in.npy", x[:5])
    code, printed = run(
        "predict", "x", "in.npy"
    )  # the folder may come from elsewhere, and a factory is code
    assert code == 2 and "--model mymodel:factory" in printed
    assert run("predict", "x", "in.npy", "--model", "othermodel:factory")[0] == 2
    own = ["--model", "mymodel:factory"]
    assert run("predict", "x", "in.npy", *own)[0] == 0
    saved = np.load(tmp_path / "in.predictions.npz")
    assert saved["mean"].shape == (5, 1) and (saved["deviation"] > 0).all()
    np.save(tmp_path / "wrong.npy", x[:5, :2])
    code, printed = run("predict", "x", "wrong.npy", *own)
    assert code == 2 and "(5, 2)" in printed and "[n, 3]" in printed


def test_the_installed_command():
    """As a user starts it: a fresh interpreter."""
    ended = subprocess.run(
        [sys.executable, "-m", "fedhb", "algorithms"], capture_output=True, text=True, check=True
    )
    assert "niw" in ended.stdout


def test_a_personal_model_is_not_the_best_global_prediction():
    def row(name: str, accuracy: float) -> dict[str, Any]:
        metrics = {"accuracy": {"mean": accuracy, "std": 0.0}}
        return {
            "algorithm": name,
            "seeds": [0],
            "seconds": 1.0,
            "global": metrics,
            "personalised": metrics,
        }

    table = comparison_table([row("fedpop", 0.9), row("niw", 0.8)], "")
    assert list(table.columns[1].cells) == ["0.9000", "[bold]0.8000[/bold]"]
    assert list(table.columns[2].cells) == ["[bold]0.9000[/bold]", "0.8000"]
    assert "fedpop with heads of their own" in str(table.caption)
    assert comparison_table([row("niw", 0.8)], "").caption is None


# ---- what a stranger should be told


def test_what_the_data_were_taken_for_is_told(run, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    few = ["--rounds", 1, "--personal-epochs", 1]
    np.savez(
        tmp_path / "all.npz",
        x=x,
        y=np.arange(120) % 2,
        client=np.arange(120) % 6,
        split=np.arange(120) % 5 == 0,
    )
    printed = run("train", "--data", "all.npz", *few, "--out", "a")[1]
    assert "all: 6 clients with 16 to 16 training examples, 2 classes; 1 of them a round" in printed
    assert "simulated" not in printed and "were drawn" not in printed
    np.savez(tmp_path / "bare.npz", x=x, y=np.arange(120) % 2)
    printed = run(
        "train",
        "--data",
        "bare.npz",
        *few,
        "--num-clients",
        4,
        "--shards-per-client",
        2,
        "--out",
        "b",
    )[1]
    assert (
        "bare: 4 clients" in printed
        and "the file names no clients (`client`): these are simulated" in printed
    )
    assert "which rows are for testing (`split`): 20% of each client's were drawn" in printed
    np.savez(tmp_path / "floats.npz", x=x, y=np.arange(120) % 2 + 0.0, client=np.arange(120) % 6)
    with pytest.warns(UserWarning, match="the real targets have only 2 different values"):
        printed = run("train", "--data", "floats.npz", *few, "--out", "c")[1]
    assert "coverage: the share of targets in their 90% intervals" in printed


def test_an_unfinished_run_is_used_with_a_word(run, tmp_path, monkeypatch):
    def stop(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedhb.runs.run.evaluate", stop)
    assert run("train", *SMALL, "--out", "x")[0] == 130
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "new.npy", np.zeros((2, 1, 8, 8), np.uint8))
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.arange(4))
    for command in (
        ("predict", "x", "new.npy"),
        ("personalise", "x", "--data", "mine.npz", "--epochs", 1),
    ):
        code, printed = run(*command)
        assert code == 0 and "x is not finished: this is its model after round 4" in printed


def test_rows_of_several_clients_are_not_personalised_on_together(run, tmp_path):
    assert run("train", *SMALL, "--out", "x")[0] == 0
    np.savez(
        tmp_path / "two.npz",
        x=np.zeros((4, 1, 8, 8), np.uint8),
        y=np.arange(4),
        client=np.array(["b", "a", "a", "b"]),
    )
    code, printed = run("personalise", "x", "--data", "two.npz")
    assert code == 2 and "two.npz holds rows of 2 clients (a, b, ...): give those of one" in printed


def test_what_is_spent_of_privacy_is_told(run, tmp_path):
    assert "privacy spent: epsilon " in run("train", *SMALL, "--dp-noise", 1, "--out", "x")[1]
