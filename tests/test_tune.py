"""Tuning: the same budget for all, validation data only, seeds that no result uses, and defaults that are what was chosen."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedhb.algorithms import ALGORITHMS, FedBABU
from fedhb.cli import main, tune_command
from fedhb.clients.clients import Share
from fedhb.errors import InputError
from fedhb.files import of_file
from fedhb.runs import run_grid, tune
from fedhb.runs.settings import TRAINING, read_toml

ROOT = Path(__file__).parent.parent
SPACE = """
seeds = [100, 101]
trials = 4
draw = 0
[[stages]]
keep = 1.0
cells = ["one"]
[[stages]]
keep = 0.5
cells = ["two"]
[common]
num_clients = 6
shards_per_client = 3
fraction = 0.5
rounds = 2
batch_size = 30
validation = 0.2
model = {hidden = 8}
[cells.one]
dataset = "digits"
[cells.two]
dataset = "digits"
local_epochs = 2
[shared]
lr = [0.01, 0.1]
personal_epochs = [1, 2]
update = ["body", "full"]
[own.niw]
kl_weight = [1e-4, 1e-2]
[own.fedavg]
update = ["full"]
"""


class Silent:
    def __init__(self):
        self.made = []

    def begin(self, todo):
        pass

    def tell(self, job, share, text):
        pass

    def recorded(self, record):
        self.made.append(record)


def write(folder: Path, text: str = SPACE) -> Path:
    path = folder / "tuning" / "space.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run(path: Path, methods: Any = None) -> tuple[list[tune.Tuned], list[dict[str, Any]]]:
    space, watcher = tune.Space.read(path), Silent()
    return tune.tune(space, methods or space.methods, 1, watcher), watcher.made


# ---- what is tried


def test_trials_are_different_and_begin_with_the_default(tmp_path):
    space = tune.Space.read(write(tmp_path), trials=5)
    for method in ("niw", "fedavg"):
        trials = list(space.trials(method).values())
        assert len(trials) == 5 and all(trials.count(choice) == 1 for choice in trials)
        assert trials[0] == space.default(method)
        for choice in trials[1:]:
            assert all(value in space.choices(method)[name] for name, value in choice.items())
    assert all(choice["update"] == "full" for choice in space.trials("fedavg").values())
    assert trials == list(tune.Space.read(space.path, trials=5).trials("fedavg").values())


def test_draws_share_their_shared_values_and_do_not_depend_on_defaults_or_the_number(
    tmp_path, monkeypatch
):
    path = write(tmp_path, SPACE + "[own.fedbabu]\n")
    few, more = tune.Space.read(path, trials=3), tune.Space.read(path, trials=6)
    assert few.trials("niw").items() <= more.trials("niw").items()
    for n in few.trials("niw").keys() & few.trials("fedbabu").keys() - {0}:
        for name in ("lr", "personal_epochs", "update"):
            assert few.trials("niw")[n][name] == few.trials("fedbabu")[n][name]
    before = more.trials("fedbabu")
    number, choice = list(before.items())[2]
    monkeypatch.setattr(FedBABU, "training", {k: v for k, v in choice.items() if k in TRAINING})
    after = tune.Space.read(path, trials=6).trials("fedbabu")
    shared = before.keys() & after.keys() - {0}
    assert len(shared) >= 4 and all(before[n] == after[n] for n in shared)
    if choice["update"] == "body":  # it is the default now, and not drawn again
        assert number not in after and after[0] == choice


def test_trial_0_is_what_the_space_begins_with(tmp_path, monkeypatch):
    """Adopting what was chosen as the default must not change what it was compared with."""
    path = write(tmp_path, SPACE + "[start.shared]\nlr = 0.07\n[start.niw]\nkl_weight = 0.5\n")
    before = tune.Space.read(path).trials("niw")
    assert before[0]["lr"] == 0.07 and before[0]["kl_weight"] == 0.5
    monkeypatch.setattr("fedhb.algorithms.NIW.training", {"lr": 0.3, "personal_epochs": 9})
    after = tune.Space.read(path)
    assert after.trials("niw")[0]["lr"] == 0.07
    assert after.grid["variants"]["niw 0"]["lr"] == 0.07


def test_a_space_that_is_too_small_is_refused(tmp_path):
    space = tune.Space.read(write(tmp_path), trials=20)
    with pytest.raises(InputError, match="trials=20: fedavg has 5 different choices"):
        space.trials("fedavg")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds = [100, 101]", "seeds = [100, 2]"), "reported with seed 2"),
        (("seeds = [100, 101]", "seeds = [17]"), "reported with seed 17"),
        (("seeds = [100, 101]", "seeds = [18]"), "reported with seed 18"),
        (("validation = 0.2", "evaluate_on = 'test'"), "evaluate_on must be validation"),
        (('cells = ["two"]', 'cells = ["too"]'), "stages has 'too' .did you mean 'two'"),
        (('cells = ["two"]', 'cells = ["two"]\nseeds = [1]'), "reported with seed 1"),
        (("keep = 1.0", "keep = 0.5"), "must keep all"),
        (("keep = 0.5", "keep = 0.0"), "keep=0.0"),
        (
            (SPACE[SPACE.index("[[stages]]") : SPACE.index("[common]")], "stages = []\n"),
            "stages is empty",
        ),
        (("trials = 4", "trials = 0"), "trials=0"),
        (("trials = 4", ""), "has no trials"),
        (("trials = 4", "trials = 'a'"), "trials is not a whole number"),
        (("seeds = [100, 101]", "seeds = 100"), "seeds is not a list of whole numbers"),
        (("keep = 0.5", ""), "keep of a stage is not a number"),
        (("lr = [0.01, 0.1]", "lr = 0.1"), "shared is not a table of lists"),
        (('update = ["full"]', "update = []"), "own.fedavg is not a table of lists"),
        (
            (SPACE[SPACE.index("[[stages]]") : SPACE.index("[common]")], "stages = 3\n"),
            "stages is not a list of tables",
        ),
        (("kl_weight", "kl_wieght"), "niw has no setting 'kl_wieght'"),
        (("\nlr = ", "\nschedule = ['step']\nlr = "), "shared has 'schedule'"),
    ],
)
def test_a_space_that_would_spoil_the_comparison_is_refused(tmp_path, change, says):
    (tmp_path / "table").mkdir()
    (tmp_path / "table/settings.toml").write_text("seeds = [16, 17]\n[cells.one]\nseeds = [18]\n")
    path = write(tmp_path, SPACE.replace(*change))
    with pytest.raises(InputError, match=says):
        run(path, ["niw"])


@pytest.mark.parametrize(
    "other",
    [
        "common = 'x'",
        "cells = 3",
        "[cells]\none = 4\nseeds = {}",
        "this is no TOML",
        "seeds = ['a', 1.5]",
    ],
)
def test_a_neighbour_that_is_no_experiment_is_passed_over(tmp_path, other):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/settings.toml").write_text(other)
    assert tune.Space.read(write(tmp_path)).content["trials"] == 4


def test_a_method_without_a_space_is_refused(tmp_path):
    with pytest.raises(InputError, match="no space for 'fedprox'"):
        run(write(tmp_path), ["fedprox"])


# ---- how it runs


def test_every_method_has_the_same_budget(tmp_path):
    found, made = run(write(tmp_path))
    count = Counter((r["key"]["variant"].split()[0], r["key"]["cell"]) for r in made)
    assert count == {
        ("niw", "one"): 8,
        ("fedavg", "one"): 8,
        ("niw", "two"): 6,
        ("fedavg", "two"): 6,
    }
    assert {one.trials for one in found} == {4}
    assert {r["key"]["seed"] for r in made} == {100, 101}
    assert {(r["settings"]["evaluate_on"], r["settings"]["validation"]) for r in made} == {
        ("validation", 0.2)
    }


def test_a_stage_may_have_seeds_of_its_own(tmp_path):
    found, made = run(
        write(tmp_path, SPACE.replace('cells = ["two"]', 'cells = ["one", "two"]\nseeds = [102]')),
        ["niw"],
    )
    count = Counter((r["key"]["cell"], r["key"]["seed"]) for r in made)
    assert count == {("one", 100): 4, ("one", 101): 4, ("one", 102): 3, ("two", 102): 3}
    both = [r for r in made if r["key"]["variant"] == "niw 0"]
    assert len(both) == 4
    assert found[0].default == pytest.approx(-sum(tune.score(r["result"])[0] for r in both) / 4)


def test_the_best_go_on_and_the_best_of_all_cells_is_chosen(tmp_path, monkeypatch):
    """By hand: trials 3 and 1, the best half beside the default, go on with it; over both cells 3 is best, or not."""
    first = {0: 0.5, 1: 0.6, 2: 0.4, 3: 0.9}
    for second, best in ((0.2, 3), (0.0, 0)):

        def run_one(settings, key, folder, tell, second=second):
            trial = int(key["variant"].split()[1])
            accuracy = (
                first.get(trial, 0.1) if key["cell"] == "one" else {0: 0.5}.get(trial, second)
            )
            return {task: {"accuracy": accuracy, "nll": 1.0} for task in ("global", "personalised")}

        monkeypatch.setattr("fedhb.runs.tune.run", run_one)
        path = write(tmp_path / str(best))
        found, made = run(path, ["fedavg"])
        space = tune.Space.read(path)
        assert 3 in space.trials("fedavg")
        assert {r["key"]["variant"] for r in made if r["key"]["cell"] == "two"} == {
            "fedavg 0",
            "fedavg 1",
            "fedavg 3",
        }
        assert found[0].choice == space.trials("fedavg")[best] and found[
            0
        ].default == pytest.approx(0.5)
        assert found[0].best == pytest.approx((0.9 + second) / 2 if best else 0.5)


@pytest.mark.parametrize(("gain", "best"), [(0.0004, 3), (0.002, 1)])
def test_scores_that_agree_to_a_tenth_of_a_percent_are_ordered_by_nll(
    tmp_path, monkeypatch, gain, best
):
    """Trial 3 has the lower NLL, trial 1 the higher accuracy: by less than a run can tell, and by more."""

    def run_one(settings, key, folder, tell):
        accuracy, nll = {1: (0.9 + gain, 0.5), 3: (0.9, 0.4)}.get(
            int(key["variant"].split()[1]), (0.5, 1.0)
        )
        return {task: {"accuracy": accuracy, "nll": nll} for task in ("global", "personalised")}

    monkeypatch.setattr("fedhb.runs.tune.run", run_one)
    path = write(tmp_path)
    found, _ = run(path, ["fedavg"])
    assert found[0].choice == tune.Space.read(path).trials("fedavg")[best]


def test_scores():
    def result(a, b, nll=1.0):
        return {"global": {"accuracy": a, "nll": nll}, "personalised": {"accuracy": b, "nll": nll}}

    assert tune.score(result(0.8, 0.6)) == (pytest.approx(-0.7), 1.0)
    assert (
        tune.score(result(0.8, 0.6, 0.5))
        < tune.score(result(0.8, 0.6))
        < tune.score(result(0.7, 0.6))
    )
    assert tune.score(result(0.1, 0.1, math.nan)) < tune.score({"diverged": "x"}) == (0.0, math.inf)


def test_recorded_trials_are_not_run_again(tmp_path):
    path = write(tmp_path)
    found, made = run(path)
    again, nothing = run(path)
    assert again == found and made and not nothing


def test_no_test_example_is_read(tmp_path, monkeypatch):
    """Test inputs that are NaN would show in any number they enter; nothing even gathers them."""
    from fedhb.runs import from_settings

    path = write(tmp_path, SPACE + "[own.mixture]\n")
    clean, _ = run(path)
    (path.parent / "records.jsonl").unlink()
    real, gather = from_settings.make_clients, Share.examples

    def poisoned(*arguments):
        from dataclasses import replace

        clients, holdout = real(*arguments)
        test = clients.test
        poison = Share(
            torch.full(test.x.shape, math.nan),
            torch.full_like(test.y, 10**6),
            test.rows,
            test.offsets,
        )
        return replace(clients, test=poison), holdout

    def watched(self, k, most=None):
        assert not self.x.is_floating_point() or not torch.isnan(self.x).any(), (
            "a test example was read"
        )
        return gather(self, k, most)

    monkeypatch.setattr(from_settings, "make_clients", poisoned)
    monkeypatch.setattr(Share, "examples", watched)
    assert run(path)[0] == clean
    with pytest.raises(AssertionError, match="a test example was read"):
        from_settings.train(from_settings.Settings(num_clients=6, rounds=1), None, progress=False)


# ---- data of one's own

OWN = """
seeds = [100]
trials = 3
[common]
data = "mine.npz"
rounds = 2
fraction = 0.5
validation = 0.2
model = {hidden = 8}
[cells.all]
[[stages]]
keep = 1.0
cells = ["all"]
[shared]
lr = [0.001, 0.03]
personal_epochs = [1, 5]
[own.niw]
[own.fedavg]
"""


def write_data(seed=0, real=False):
    rng = np.random.default_rng(seed)
    x, client = rng.normal(size=(200, 3)), np.repeat(["a", "b", "c", "d"], 50)
    y = x.sum(1) + 0.1 * rng.normal(size=200)
    np.savez("mine.npz", x=x, y=y if real else (y > 0).astype(int), client=client)
    os.utime("mine.npz", (seed, seed))  # clocks tick slowly


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A command in an empty folder: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

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
    assert code == 2 and "mine.npz: there is no such file from here" in printed
    write_data()
    code, printed = command("tune", path)
    assert (
        code == 0
        and f"fedhb compare --data mine.npz --rounds 2 --fraction 0.5 --set model.hidden=8 --tuned {path.parent / 'chosen.toml'}"
        in printed
    )
    assert "not the default" not in printed
    chosen = read_toml(path.parent / "chosen.toml")
    assert chosen["niw"]["data"] == chosen["fedavg"]["data"] == of_file("mine.npz")
    other = tune.Tuned(
        "niw", "accuracy", 0.5, 0.6, {"lr": 0.007, "personal_epochs": 3, "p_do": 0.9}, {}, trials=3
    )
    tune.write_chosen(path.parent / "chosen.toml", [other], of_file("mine.npz"))  # whatever it was
    options = ("--data", "mine.npz", "--rounds", 1, "--seeds", 0, "--set", "model.hidden=8")
    code, printed = command(
        "compare",
        *options,
        "--algorithms",
        "niw,fedavg,fedbabu",
        "--tuned",
        path.parent / "chosen.toml",
    )
    assert code == 0 and "chosen.toml has nothing of fedbabu: defaults are used there" in printed
    settings = {
        name: read_toml(Path(f"runs/compare/{name}-seed0/settings.toml"))
        for name in ("niw", "fedavg", "fedbabu")
    }
    assert (
        settings["niw"]["lr"],
        settings["niw"]["personal_epochs"],
        settings["niw"]["niw"]["p_do"],
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
        "niw.p_do=0.8",
    )
    code, printed = command(*train, "--tuned", path.parent / "chosen.toml")
    assert code == 0 and "because flags or the settings file give it: lr, niw.p_do" in printed
    one = read_toml(Path("x/settings.toml"))
    assert (one["lr"], one["personal_epochs"], one["niw"]["p_do"]) == (
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
    assert "chosen.toml was chosen on other data: mine.npz" in printed
    tune.write_chosen(
        path.parent / "chosen.toml", [replace(other, method="fedavg")], of_file("mine.npz")
    )
    assert list(read_toml(path.parent / "chosen.toml")) == [
        "fedavg"
    ]  # the others are of other data


@pytest.mark.parametrize("text", ["[mine]\nlr = 0.1\n", "[niw]\nlr = 1\n"])
def test_a_file_that_was_not_written_by_tune_is_not_written_over(tmp_path, command, text):
    """Said before the first trial, not after the last."""
    path = write(tmp_path, OWN)
    write_data()
    (path.parent / "chosen.toml").write_text(text)
    code, printed = command("tune", path)
    assert (
        code == 2
        and "is not what `fedhb tune` writes" in printed
        and (path.parent / "chosen.toml").read_text() == text
    )
    assert not (path.parent / "records.jsonl").exists()


def test_a_file_takes_the_place_of_a_data_set_and_the_other_way_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data()
    settings = {
        "cells": {"digits": {"dataset": "digits"}, "mine": {}},
        "variants": {"niw": {}},
        "common": {"data": "mine.npz"},
    }
    found = {
        cell: run_grid.resolved(settings, {"cell": cell, "variant": "niw", "seed": 0})
        for cell in settings["cells"]
    }
    assert [one["dataset"] for one in found.values()] == [
        "digits",
        "mine.npz",
    ] and "data" not in found["digits"]
    settings["cells"]["mine"] |= {"dataset": "digits", "data": "mine.npz"}
    with pytest.raises(InputError, match=r"both data=.mine\.npz. and dataset=.digits.: give one"):
        run_grid.resolved(settings, {"cell": "mine", "variant": "niw", "seed": 0})


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data()
    before = run_grid.dataset_of("digits", "mine.npz")
    assert run_grid.dataset_of("digits", "mine.npz") is before
    write_data(seed=1)
    assert run_grid.dataset_of("digits", "mine.npz") is not before


def test_a_settings_file_with_one_seed_may_lie_beside_a_space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, OWN)
    write_data()
    neighbour = path.parent.parent / "study"
    neighbour.mkdir()
    (neighbour / "settings.toml").write_text("seeds = 3\n")
    assert tune.Space.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "[niw]\nlr = 0.1\n",
        "lr = 0.1\n",
        "[nwi.training]\n[nwi.settings]\n",
        "[niw.training]\nrounds = 3\n[niw.settings]\n",
    ],
)
def test_another_file_is_not_what_was_chosen(tmp_path, command, text):
    Path("chosen.toml").write_text(text)
    code, printed = command("train", "--rounds", 1, "--tuned", "chosen.toml")
    assert code == 2 and "is not what `fedhb tune` writes for an algorithm" in printed


def test_real_targets_are_tuned_by_nll(tmp_path, monkeypatch):
    """A trial that diverged is the worst, also where every NLL is above zero."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, OWN)
    write_data(real=True)
    found, made = run(path)
    for one in found:
        means = {
            r["key"]["variant"]: (r["result"]["global"]["nll"] + r["result"]["personalised"]["nll"])
            / 2
            for r in made
            if r["key"]["variant"].startswith(one.method)
        }
        assert one.metric == "nll" and one.best == pytest.approx(min(means.values()))
        assert one.default == pytest.approx(means[f"{one.method} 0"])
    assert tune.score({"diverged": "x"}) > max(tune.score(r["result"]) for r in made)
    tune.write_chosen(path.parent / "chosen.toml", found)
    assert {"nll", "default_nll"} <= read_toml(path.parent / "chosen.toml")["niw"].keys()
    assert tune_command.table(found).title == "validation NLL"


# ---- what is chosen


def test_the_command(tmp_path, command):
    path = write(tmp_path)
    code, printed = command("tune", path, "--algorithms", "fedavg", "--trials", "3")
    assert code == 0 and "fedavg" in printed and "validation score" in printed
    chosen = read_toml(path.parent / "chosen.toml")
    assert set(chosen) == {"fedavg"} and chosen["fedavg"]["trials"] == 3
    assert set(chosen["fedavg"]["training"]) == {"lr", "personal_epochs"} and chosen["fedavg"][
        "settings"
    ] == {"update": "full"}
    assert ("not the default of the code yet" in printed) == bool(tune.differences(chosen))
    assert command("tune", path, "--algorithms", "niw")[0] == 0
    both = read_toml(path.parent / "chosen.toml")
    assert set(both) == {"niw", "fedavg"} and both["fedavg"] == chosen["fedavg"]
    records = [
        json.loads(line) for line in (path.parent / "records.jsonl").read_text().splitlines()
    ]
    assert records[0]["command"] == f"fedhb tune {path} --trials 3 --algorithms fedavg"
    assert command("tune", path, "--trials", "1000")[0] == 2


def test_differences_from_the_code_are_seen(monkeypatch):
    monkeypatch.setattr(FedBABU, "training", {})
    chosen = {"fedbabu": {"training": {"lr": 0.3}, "settings": {"update": "full"}}}
    assert tune.differences(chosen) == [
        "fedbabu: lr is 0.1, chosen was 0.3",
        "fedbabu: update is body, chosen was full",
    ]
    monkeypatch.setattr(FedBABU, "training", {"lr": 0.3})
    assert tune.differences(chosen) == ["fedbabu: update is body, chosen was full"]


def test_the_defaults_of_the_code_are_those_that_were_chosen():
    path = ROOT / "experiments/tuning/chosen.toml"
    assert tune.differences(read_toml(path) if path.exists() else {}) == []


def test_our_space_is_sound():
    space = tune.Space.read(ROOT / "experiments/tuning/space.toml")
    assert set(space.methods) == set(ALGORITHMS)
    assert len(space.grid["variants"]) == len(ALGORITHMS) * space.content["trials"]
