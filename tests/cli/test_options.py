"""The flags of the command line: their defaults, what a file of settings leaves to them, and which
have no effect.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from command_line import SMALL


def test_help_tells_every_default(run, monkeypatch):
    """Brackets are styles to rich: those with words in them would vanish."""
    monkeypatch.setenv("COLUMNS", "200")
    code, printed = run("train", "-h")
    assert code == 0 and "[]" not in printed
    for default in (
        "[digits]",
        "[empirical-bayes]",
        "[step]",
        "[0.1]",
        "[runs/DATASET-ALGORITHM-seedN]",
    ):
        assert default in printed
    assert (
        "[empirical-bayes,mixture,fedavg]" in run("compare", "-h")[1]
        and "[DIR/run]" in run("deploy", "up", "-h")[1]
    )


def test_flags_override_the_file_and_the_resolved_file_gives_the_same_run(run, tmp_path):
    (tmp_path / "s.toml").write_text(
        'algorithm = "empirical-bayes"\nrounds = 99\nseed = 3\n[empirical-bayes]\nkl_weight = 0.01\n'
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


@pytest.mark.parametrize(("flag", "value"), [("--algorithm", "empirical-bayes"), ("--seed", "7")])
def test_a_comparison_has_no_flag_for_one_of_what_it_takes_several_of(run, tmp_path, flag, value):
    code, printed = run("compare", *SMALL, flag, value, "--out", "c")
    assert code == 2 and f"{flag}s" in printed and not (tmp_path / "c").exists()


def test_a_seed_that_is_given_twice_counts_once(run, tmp_path):
    assert run("compare", *SMALL, "--algorithms", "fedavg", "--seeds", "3,3", "--out", "c")[0] == 0
    assert json.loads((tmp_path / "c/comparison.json").read_text())["rows"][0]["seeds"] == [3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--alpha", "0.3"],
            "alpha=0.3.*--partition dirichlet",
        ),
        (
            ["--num-clients", "3"],
            "num_clients=3.*--part",
        ),
        (
            ["--shards-per-client", "2"],
            "shards_per_client=2",
        ),
        (
            ["--partition", "iid", "--shards-per-client", "2"],
            "shards_per_client=2.*iid",
        ),
        (
            ["--group-split", "group"],
            "group_split='group'",
        ),
        (
            ["--dp-clip", "2"],
            "dp_clip=2.0.*--dp-noise",
        ),
        (["--dp-delta", "1e-6"], "dp_delta=1e-06"),
        (["--dataset", "digits"], "dataset='digits'.*data='own.npz'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_flag_that_changes_nothing_is_refused(run, tmp_path, command, arguments, says):
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) % 4)
    code, printed = run(command, "--data", "own.npz", "--rounds", "1", "--out", "x", *arguments)
    assert code == 2 and re.search(says, printed) and not (tmp_path / "x").exists()


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
    assert code == 2 and "TOML" in printed
