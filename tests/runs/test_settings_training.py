"""Settings of an algorithm of its own: its hyper-parameters and its training."""

from __future__ import annotations

import math

import pytest

from fedhb.algorithms import ALGORITHMS, build
from fedhb.errors import InputError
from fedhb.runs import settings as module
from fedhb.runs.settings import Settings


@pytest.fixture(autouse=True)
def no_training_of_their_own(monkeypatch):
    """Remove the training values that the algorithms were tuned to."""
    for cls in ALGORITHMS.values():
        monkeypatch.setattr(cls, "training", {})


def read_back(settings, folder):
    path = folder / "settings.toml"
    path.write_bytes(settings.to_toml({"fedhb": "1", "torch": "2"}).encode())
    return Settings.resolve(path, {})


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedag", {}, "'fedag'.*'fedavg'"),
        ("empirical-bayes", {"kl_wieght": 1}, "empirical-bayes.*'kl_wieght'.*'kl_weight'"),
        ("empirical-bayes", {"kl_weight": "much"}, "empirical-bayes.kl_weight='much'"),
        ("empirical-bayes", {"begin": "first"}, "empirical-bayes.begin='first'.*global.*last"),
        ("empirical-bayes", {"update": "head"}, "empirical-bayes.update='head'.*body.*full"),
        ("niw", {"dof": "half"}, "niw.dof='half'"),
        ("niw", {"precision": "median"}, "niw.precision='median'"),
        ("empirical-bayes", {"p_do": 1.5}, "empirical-bayes.p_do=1.5.*0.0.*1.0"),
        ("empirical-bayes", {"p_do": -0.1}, "empirical-bayes.p_do=-0.1"),
        ("empirical-bayes", {"p_do": math.nan}, "empirical-bayes.p_do=nan"),
        ("empirical-bayes", {"lambda0": -1}, "empirical-bayes.lambda0=-1.0"),
        ("empirical-bayes", {"prior_scale": 0}, "empirical-bayes.prior_scale=0.0.*positive"),
        ("empirical-bayes", {"num_samples": -1}, "empirical-bayes.num_samples=-1"),
        ("empirical-bayes", {"num_samples": 1.5}, "empirical-bayes.num_samples=1.5"),
        ("empirical-bayes", {"kl_weight": -1}, "empirical-bayes.kl_weight=-1.0"),
        ("mixture", {"num_prototypes": 0}, "mixture.num_prototypes=0"),
        ("mixture", {"sigma2": 0}, "mixture.sigma2=0.0"),
        ("mixture", {"shrink": "perhaps"}, "mixture.shrink='perhaps'.*true"),
        ("fedprox", {"mu": -0.5}, "fedprox.mu=-0.5"),
        ("fedavg", {"weighted": 2}, "fedavg.weighted=2.*true"),
    ],
)
def test_an_algorithms_settings_are_checked(name, options, says):
    with pytest.raises(InputError, match=says):
        build(name, options)


def test_an_algorithms_settings_are_taken():
    algorithm = build(
        "mixture", {"num_prototypes": "3", "shrink": "false", "sigma2": 1, "begin": "last"}
    )
    assert (algorithm.num_prototypes, algorithm.shrink, algorithm.sigma2, algorithm.begin) == (
        3,
        False,
        1.0,
        "last",
    )
    assert build("empirical-bayes", {"p_do": 1, "lambda0": 0, "num_samples": 0}).p_do == 1.0


def test_settings_know_the_registry():
    """The names stand twice so that the command line's help need not import torch."""
    from fedhb.algorithms import ALGORITHMS
    from fedhb.runs import settings

    assert tuple(ALGORITHMS) == settings.ALGORITHMS


@pytest.fixture
def own_training(monkeypatch):
    """FedBABU with values of its own."""
    monkeypatch.setattr(ALGORITHMS["fedbabu"], "training", {"lr": 0.02, "personal_epochs": 2})


def test_an_algorithms_own_training_comes_before_the_defaults_and_after_what_is_given(
    own_training, tmp_path
):
    settings = Settings.resolve(None, {"algorithm": "fedbabu"})
    training = settings.training
    assert (training.lr, settings.personalisation.epochs, training.momentum) == (0.02, 2, 0.9)
    # given, though it is the default
    assert Settings.resolve(None, {"algorithm": "fedbabu", "lr": 0.1}).training.lr == 0.1
    path = write(tmp_path, "algorithm = 'fedbabu'\nlr = 0.3\n")
    settings = Settings.resolve(path, {})
    assert (settings.training.lr, settings.personalisation.epochs) == (0.3, 2)
    content = {"algorithm": "fedbabu", "fedbabu": {"weighted": True}}
    assert Settings.resolve(content, {}).training.lr == 0.02
    assert Settings.resolve(None, {"algorithm": "fedavg"}).training.lr == 0.1
    assert module.training_values(build("fedbabu"), {"lr": None, "momentum": 0.5}) == {
        "lr": 0.02, "momentum": 0.5, "personal_lr": 1e-3, "personal_epochs": 2,
    }  # fmt: skip


def test_resolved_settings_do_not_change_with_the_algorithms_own(own_training, tmp_path):
    settings = Settings.resolve(None, {"algorithm": "fedbabu"})
    ALGORITHMS["fedbabu"].training["lr"] = 0.7
    assert read_back(settings, tmp_path) == settings and settings.training.lr == 0.02


def test_training_has_known_names_only(monkeypatch):
    monkeypatch.setattr(ALGORITHMS["fedbabu"], "training", {"rounds": 3})
    with pytest.raises(InputError, match="fedbabu.training.*'rounds'"):
        Settings.resolve(None, {"algorithm": "fedbabu"})


def test_help_does_not_wait_for_torch():
    import subprocess
    import sys

    code = "import fedhb.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_algorithms_own_training_values_are_not_inherited(monkeypatch):
    from fedhb.algorithms import FedAvg

    monkeypatch.setattr(FedAvg, "training", {"lr": 0.07})
    assert Settings.resolve(None, {"algorithm": "fedavg"}).training.lr == 0.07
    assert Settings.resolve(None, {"algorithm": "fedpa"}).training.lr != 0.07
    assert Settings.resolve(None, {"algorithm": "fedavg", "lr": 0.2}).training.lr == 0.2
