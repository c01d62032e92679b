"""`fedhb tune`: on the embedded digits and on a file of examples."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tuning import OWN, run, write, write_data

from fedhb.algorithms import FedBABU
from fedhb.files import of_file
from fedhb.runs import tune
from fedhb.runs.settings import read_toml


@pytest.fixture
def command(run, monkeypatch):
    """A command in an empty folder, with wide lines: (exit code, what it printed)."""
    monkeypatch.setenv("COLUMNS", "200")
    return run


def test_trials_on_a_file_are_of_what_was_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, OWN)
    write_data()
    found, made = run(path)
    digest = hashlib.sha256(Path("mine.npz").read_bytes()).hexdigest()
    assert len(made) == 6 and {one.metric for one in found} == {"accuracy"}
    assert {(r["settings"]["dataset"], r["settings"]["data"]) for r in made} == {
        ("mine.npz", digest)
    }
    assert {json.dumps(r["result"]["data"]) for r in made} == {json.dumps({"mine.npz": digest})}
    assert run(path)[1] == []
    write_data(seed=1)
    assert len(run(path)[1]) == 6


def test_what_is_chosen_on_a_file_is_compared_with(tmp_path, command):
    path = write(tmp_path, OWN)
    code, printed = command("tune", path)
    assert code == 2 and "mine.npz" in printed
    write_data()
    code, printed = command("tune", path)
    assert (
        code == 0
        and f"fedhb compare --data mine.npz --rounds 2 --fraction 0.5 --set model.hidden=8 --tuned {path.parent / 'chosen.toml'}"
        in printed
    )
    assert "not the default" not in printed
    chosen = read_toml(path.parent / "chosen.toml")
    assert chosen["empirical-bayes"]["data"] == chosen["fedavg"]["data"] == of_file("mine.npz")
    other = tune.Tuned(
        "empirical-bayes",
        "accuracy",
        0.5,
        0.6,
        {"lr": 0.007, "personal_epochs": 3, "p_do": 0.9},
        {},
        trials=3,
    )
    tune.write_chosen(path.parent / "chosen.toml", [other], of_file("mine.npz"))  # whatever it was
    options = ("--data", "mine.npz", "--rounds", 1, "--seeds", 0, "--set", "model.hidden=8")
    code, printed = command(
        "compare",
        *options,
        "--algorithms",
        "empirical-bayes,fedavg,fedbabu",
        "--tuned",
        path.parent / "chosen.toml",
    )
    assert code == 0 and "fedbabu" in printed
    settings = {
        name: read_toml(Path(f"runs/compare/{name}-seed0/settings.toml"))
        for name in ("empirical-bayes", "fedavg", "fedbabu")
    }
    assert (
        settings["empirical-bayes"]["lr"],
        settings["empirical-bayes"]["personal_epochs"],
        settings["empirical-bayes"]["empirical-bayes"]["p_do"],
    ) == (0.007, 3, 0.9)
    assert settings["fedavg"]["lr"] == chosen["fedavg"]["training"]["lr"]
    assert settings["fedbabu"]["lr"] == FedBABU.training["lr"]
    train = (
        "train",
        "--data",
        "mine.npz",
        "--rounds",
        1,
        "--out",
        "x",
        "--lr",
        0.2,
        "--set",
        "empirical-bayes.p_do=0.8",
    )
    code, printed = command(*train, "--tuned", path.parent / "chosen.toml")
    assert code == 0 and "lr, empirical-bayes.p_do" in printed
    one = read_toml(Path("x/settings.toml"))
    assert (one["lr"], one["personal_epochs"], one["empirical-bayes"]["p_do"]) == (
        0.2,
        3,
        0.8,
    )  # what is given counts
    assert "chosen on other data" not in printed
    tune.write_chosen(
        path.parent / "both.toml", [other], f"a.npz 0123, {of_file('mine.npz')}"
    )  # tuned on several files
    assert (
        "chosen on other data"
        not in command(*train, "--resume", "--tuned", path.parent / "both.toml")[1]
    )
    assert (
        "chosen on other data"
        in command("train", "--rounds", 1, "--out", "y", "--tuned", path.parent / "both.toml")[1]
    )
    write_data(seed=1)
    code, printed = command(*train, "--resume", "--tuned", path.parent / "chosen.toml")
    assert "chosen on other data" in printed and "mine.npz" in printed
    tune.write_chosen(
        path.parent / "chosen.toml", [replace(other, method="fedavg")], of_file("mine.npz")
    )
    assert list(read_toml(path.parent / "chosen.toml")) == [
        "fedavg"
    ]  # the others are of other data


@pytest.mark.parametrize("text", ["[mine]\nlr = 0.1\n", "[empirical-bayes]\nlr = 1\n"])
def test_a_file_that_was_not_written_by_tune_is_not_written_over(tmp_path, command, text):
    """Said before the first trial, not after the last."""
    path = write(tmp_path, OWN)
    write_data()
    (path.parent / "chosen.toml").write_text(text)
    code, printed = command("tune", path)
    assert (
        code == 2
        and "`fedhb tune`" in printed
        and (path.parent / "chosen.toml").read_text() == text
    )
    assert not (path.parent / "records.jsonl").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[empirical-bayes]\nlr = 0.1\n",
        "lr = 0.1\n",
        "[nwi.training]\n[nwi.settings]\n",
        "[empirical-bayes.training]\nrounds = 3\n[empirical-bayes.settings]\n",
    ],
)
def test_another_file_is_not_what_was_chosen(tmp_path, command, text):
    Path("chosen.toml").write_text(text)
    code, printed = command("train", "--rounds", 1, "--tuned", "chosen.toml")
    assert code == 2 and "`fedhb tune`" in printed


def test_the_command(tmp_path, command):
    path = write(tmp_path)
    code, printed = command("tune", path, "--algorithms", "fedavg", "--trials", "3")
    assert code == 0 and "fedavg" in printed and "validation score" in printed
    chosen = read_toml(path.parent / "chosen.toml")
    assert set(chosen) == {"fedavg"} and chosen["fedavg"]["trials"] == 3
    assert set(chosen["fedavg"]["training"]) == {"lr", "personal_epochs"} and chosen["fedavg"][
        "settings"
    ] == {"update": "full"}
    assert ("not the default" in printed) == bool(tune.differences(chosen))
    assert command("tune", path, "--algorithms", "niw")[0] == 0
    both = read_toml(path.parent / "chosen.toml")
    assert set(both) == {"niw", "fedavg"} and both["fedavg"] == chosen["fedavg"]
    records = [
        json.loads(line) for line in (path.parent / "records.jsonl").read_text().splitlines()
    ]
    assert records[0]["command"] == f"fedhb tune {path} --trials 3 --algorithms fedavg"
    assert command("tune", path, "--trials", "1000")[0] == 2
