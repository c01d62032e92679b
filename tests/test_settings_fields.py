"""Values of settings: from text or TOML to the type of their default."""

from __future__ import annotations

import pytest

from fedhb.algorithms import ALGORITHMS
from fedhb.errors import InputError
from fedhb.runs.settings import Settings


@pytest.fixture(autouse=True)
def no_training_of_their_own(monkeypatch):
    """Remove the training values that the algorithms were tuned to."""
    for cls in ALGORITHMS.values():
        monkeypatch.setattr(cls, "training", {})


def test_values_may_come_as_text():
    settings = Settings.resolve(None, {"rounds": "12", "lr": "1e-3", "dataset": "mnist"})
    training = settings.training
    assert (training.rounds, training.lr, settings.data.dataset) == (12, 1e-3, "mnist")
    assert Settings.resolve(None, {"rounds": 12.0}).training.rounds == 12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("empirical-bayes.kl_weight=0.001", 0.001),
        ("empirical-bayes.kl_weight = 1e-3", 0.001),
        ("empirical-bayes.num_samples=3", 3),
        ("empirical-bayes.begin=last", "last"),
        ("empirical-bayes.begin='last'", "last"),
        ('empirical-bayes.begin="a = b"', "a = b"),
        ("empirical-bayes.begin=a=b", "a=b"),
        ("empirical-bayes.shrink=true", True),
        ("empirical-bayes.begin=", ""),
        ("empirical-bayes.list=[1, 2]", [1, 2]),
    ],
)
def test_set_reads_toml_values_or_text(text, value):
    (found,) = Settings.resolve(None, {}, [text]).options["empirical-bayes"].values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["empirical-bayes.kl_weight", "kl_weight=1", "empirical-bayes.=1", "=1", "niw=1", ""]
)
def test_set_needs_table_key_and_value(text):
    with pytest.raises(InputError, match=r"TABLE\.KEY=VALUE"):
        Settings.resolve(None, {}, [text])
