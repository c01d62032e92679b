"""The space of tuning: its trials, and the mistakes that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuning import OWN, SPACE, run, write, write_data

from fedhb.algorithms import ALGORITHMS, FedBABU
from fedhb.errors import InputError
from fedhb.runs import tune
from fedhb.runs.settings import TRAINING

ROOT = Path(__file__).parents[2]


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
    with pytest.raises(InputError, match=r"trials=20.*fedavg.* 5 "):
        space.trials("fedavg")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds = [100, 101]", "seeds = [100, 2]"), "seed 2"),
        (("seeds = [100, 101]", "seeds = [17]"), "seed 17"),
        (("seeds = [100, 101]", "seeds = [18]"), "seed 18"),
        (("validation = 0.2", "evaluate_on = 'test'"), "evaluate_on.*validation"),
        (('cells = ["two"]', 'cells = ["too"]'), "stages.*'too'.*'two'"),
        (('cells = ["two"]', 'cells = ["two"]\nseeds = [1]'), "seed 1"),
        (("keep = 1.0", "keep = 0.5"), "keep"),
        (("keep = 0.5", "keep = 0.0"), "keep=0.0"),
        (
            (SPACE[SPACE.index("[[stages]]") : SPACE.index("[common]")], "stages = []\n"),
            "stages",
        ),
        (("trials = 4", "trials = 0"), "trials=0"),
        (("trials = 4", ""), "trials"),
        (("trials = 4", "trials = 'a'"), "trials.*whole"),
        (("seeds = [100, 101]", "seeds = 100"), "seeds.*whole"),
        (("keep = 0.5", ""), "keep.*number"),
        (("lr = [0.01, 0.1]", "lr = 0.1"), "shared.*lists"),
        (('update = ["full"]', "update = []"), "own.fedavg.*lists"),
        (
            (SPACE[SPACE.index("[[stages]]") : SPACE.index("[common]")], "stages = 3\n"),
            "stages.*tables",
        ),
        (("kl_weight", "kl_wieght"), "niw.*'kl_wieght'"),
        (("\nlr = ", "\nschedule = ['step']\nlr = "), "shared.*'schedule'"),
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


def test_our_space_is_sound():
    space = tune.Space.read(ROOT / "experiments/tuning/space.toml")
    assert set(space.methods) == set(ALGORITHMS) - {"niw"}  # whose settings are the paper's
    assert len(space.grid["variants"]) == len(space.methods) * space.content["trials"]


def test_a_settings_file_with_one_seed_may_lie_beside_a_space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, OWN)
    write_data()
    neighbour = path.parent.parent / "study"
    neighbour.mkdir()
    (neighbour / "settings.toml").write_text("seeds = 3\n")
    assert tune.Space.read(path)
