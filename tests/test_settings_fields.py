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
    assert (settings.rounds, settings.lr, settings.dataset) == (12, 1e-3, "mnist")
    assert Settings.resolve(None, {"rounds": 12.0}).rounds == 12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("niw.kl_weight=0.001", 0.001),
        ("niw.kl_weight = 1e-3", 0.001),
        ("niw.num_samples=3", 3),
        ("niw.begin=last", "last"),
        ("niw.begin='last'", "last"),
        ('niw.begin="a = b"', "a = b"),
        ("niw.begin=a=b", "a=b"),
        ("niw.shrink=true", True),
        ("niw.begin=", ""),
        ("niw.list=[1, 2]", [1, 2]),
    ],
)
def test_set_reads_toml_values_or_text(text, value):
    (found,) = Settings.resolve(None, {}, [text]).options["niw"].values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["niw.kl_weight", "kl_weight=1", "niw.=1", "=1", "niw=1", ""])
def test_set_needs_table_key_and_value(text):
    with pytest.raises(InputError, match=r"TABLE\.KEY=VALUE"):
        Settings.resolve(None, {}, [text])
