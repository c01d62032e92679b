"""Settings: what is written is read back, what is misspelt is named, and every bound holds on both
sides.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhb.algorithms import ALGORITHMS
from fedhb.errors import InputError
from fedhb.runs import settings as module
from fedhb.runs.settings import Settings

NAMES = list(module.flat_fields())


@pytest.fixture(autouse=True)
def no_training_of_their_own(monkeypatch):
    """Remove the training values that the algorithms were tuned to."""
    for cls in ALGORITHMS.values():
        monkeypatch.setattr(cls, "training", {})


at_least_one, not_negative = st.integers(1, module.MOST_WHOLE), st.integers(0, module.MOST_WHOLE)


positive = st.floats(0, exclude_min=True, allow_infinity=False)


share = st.floats(0, 1, exclude_max=True)


values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.lists(st.one_of(st.integers(), st.text(max_size=5))),
)


fields = {
    **dict.fromkeys(("dataset", "data", "model", "head", "device", "unseen"), st.text()),
    **dict.fromkeys(
        (
            "num_clients",
            "rounds",
            "local_epochs",
            "batch_size",
            "personal_epochs",
            "checkpoint_every",
            "shards_per_client",
        ),
        at_least_one,
    ),
    **dict.fromkeys(("holdout_clients", "max_examples", "workers", "seed"), not_negative),
    **dict.fromkeys(("lr", "personal_lr", "alpha", "dp_clip"), positive),
    "dp_noise": st.floats(0, allow_infinity=False),
    "dp_delta": st.floats(0, 1, exclude_min=True, exclude_max=True),
    **dict.fromkeys(("momentum", "validation", "server_share"), share),
    "fraction": st.floats(0, 1, exclude_min=True),
    "algorithm": st.sampled_from(module.ALGORITHMS),
    "partition": st.sampled_from(("", *module.PARTITIONS)),
    "schedule": st.sampled_from(module.SCHEDULES),
    "group_split": st.sampled_from(module.GROUP_SPLITS),
    "batch_norm": st.sampled_from(("running", "batch")),
    "evaluate_on": st.just("test"),
    "defence": st.sampled_from(("", "default", "clip", "refuse, krum")),
    "options": st.dictionaries(
        st.sampled_from((*module.ALGORITHMS, "model")),
        st.dictionaries(st.text(max_size=8).filter(lambda key: key != "name"), values, max_size=3),
        max_size=3,
    ),
}


def read_back(settings, folder):
    path = folder / "settings.toml"
    path.write_bytes(settings.to_toml({"fedhb": "1", "torch": "2"}).encode())
    return Settings.resolve(path, {})


@given(st.fixed_dictionaries({}, optional=fields))
def test_what_is_written_is_read_back(tmp_path_factory, given_values):
    if given_values.get("dp_noise"):
        given_values.pop("defence", None)  # the one hides what the other looks at
    settings = Settings.of(**given_values)
    assert read_back(settings, tmp_path_factory.getbasetemp()) == settings


def test_the_strategy_covers_every_setting():
    assert set(fields) == {*NAMES, "options"}


def test_the_model_has_a_name_and_options(tmp_path):
    settings = Settings.of(model="mobilenet", options={"model": {"width": 0.25}})
    assert read_back(settings, tmp_path) == settings
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nname = "mlp"\nhidden = 64\n')
    assert Settings.resolve(path, {}) == Settings.of(model="mlp", options={"model": {"hidden": 64}})
    assert Settings.resolve(path, {"model": "convnet"}, ["model.hidden=8"]) == Settings.of(
        model="convnet", options={"model": {"hidden": 8}}
    )


def test_the_names_of_the_algorithms_are_the_registrys():
    # the command line reads them from settings.py, so that `fedhb --help` does not wait for torch
    assert tuple(ALGORITHMS) == module.ALGORITHMS


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_flags_then_set(tmp_path):
    path = write(
        tmp_path,
        "rounds = 7\nlr = 0.5\nseed = 3\n[empirical-bayes]\nkl_weight = 0.1\nbegin = 'last'\n",
    )
    settings = Settings.resolve(
        path,
        {"lr": 0.25, "seed": None},
        ["empirical-bayes.kl_weight=0.01", "mixture.num_prototypes=3"],
    )
    assert (settings.training.rounds, settings.training.lr, settings.seed) == (7, 0.25, 3)
    assert settings.training.batch_size == 50
    assert settings.options == {
        "empirical-bayes": {"kl_weight": 0.01, "begin": "last"},
        "mixture": {"num_prototypes": 3},
    }
    assert Settings.resolve(None, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("round = 3", "'round'.*'rounds'"),
        ("[nwi]\nkl_weight = 1", "'nwi'.*'niw'"),
        ("algorithm = 'fedag'", "algorithm='fedag'.*'fedavg'"),
        ("partition = 'shard'", "partition='shard'.*'shards'"),
        ("schedule = 'stepp'", "schedule='stepp'.*'step'"),
        ("options = 3", "'options'"),
        ("rounds = 'many'", "rounds='many'.*100"),
        ("rounds = 1.5", "rounds=1.5.*100"),
        ("rounds = inf", "rounds=inf.*100"),
        ("rounds = true", "rounds=True.*100"),
        ("lr = true", "lr=True.*0.1"),
        ("lr = [0.1]", "lr=.0.1..*0.1"),
        ("rounds 3", "TOML"),
        ("model = 3\n[model]\nhidden = 3", "TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        Settings.resolve(write(tmp_path, text), {})


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"absent\.toml"):
        Settings.resolve(tmp_path / "absent.toml", {})
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="TOML"):
        Settings.resolve(path, {})


def test_a_flag_or_a_table_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="'learning_rate'"):
        Settings.resolve(None, {"learning_rate": 1})
    with pytest.raises(InputError, match="'fedporx'.*'fedprox'"):
        Settings.resolve(None, {}, ["fedporx.mu=1"])


def test_a_value_that_a_file_cannot_hold_is_refused():
    with pytest.raises(InputError, match=r"model\.when=1979-05-27"):
        Settings.resolve(None, {}, ["model.when=1979-05-27"])


INFINITY = math.inf


BOUNDS = {
    **{
        name: ([1, 10**9], [0, -1])
        for name in ("num_clients", "rounds", "local_epochs", "batch_size")
    },
    **{
        name: ([1, 10**9], [0, -1])
        for name in ("personal_epochs", "checkpoint_every", "shards_per_client")
    },
    **{
        name: ([1e-12, 1e12], [0.0, -1e-12, INFINITY, math.nan])
        for name in ("lr", "personal_lr", "alpha")
    },
    **{name: ([0, 10**9], [-1]) for name in ("holdout_clients", "max_examples", "workers", "seed")},
    "momentum": ([0.0, 0.999], [1.0, -0.001, math.nan]),
    "validation": ([0.0, 0.999], [1.0, -0.001, math.nan]),
    "server_share": ([0.0, 0.999], [1.0, -0.001, math.nan]),
    "fraction": ([1e-9, 1.0], [0.0, -0.1, 1.001, math.nan]),
    "algorithm": (module.ALGORITHMS, ["", "NIW"]),
    "partition": (("", *module.PARTITIONS), ["other"]),
    "schedule": (module.SCHEDULES, [""]),
    "batch_norm": (["running", "batch"], ["", "none"]),
    "evaluate_on": (["test"], ["train", ""]),
    "defence": (
        ["", "default", "refuse,clip,winsorise,krum"],
        ["none", "clip;krum", "default,clip"],
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    good, bad = BOUNDS[name]
    for value in good:
        assert Settings.of(**{name: value}).flat()[name] == value
    for value in bad:
        with pytest.raises(InputError, match=f"{name}="):
            Settings.of(**{name: value})


def test_validation_numbers_need_a_validation_split():
    with pytest.raises(InputError, match="validation"):
        Settings.of(evaluate_on="validation")
    assert Settings.of(evaluate_on="validation", validation=0.1).evaluation.split == "validation"


IDLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alpha": ({"alpha": 0.1}, {"partition": "dirichlet"}),
    "shards_per_client": ({"partition": "iid", "shards_per_client": 2}, {"partition": "groups"}),
    "num_clients": ({"partition": "natural", "num_clients": 2}, {"partition": ""}),
    "group_split": ({"partition": "shards", "group_split": "image"}, {"partition": ""}),
    "dp_clip": ({"dp_clip": 2.0}, {"dp_noise": 1.0}),
    "dp_delta": ({"dp_delta": 1e-6}, {"dp_noise": 1.0}),
    "dataset": ({"dataset": "mnist", "data": "own.npz"}, {"data": ""}),
}
"""Flags of which the one that is named has no effect, and what gives it one."""


@pytest.mark.parametrize("name", IDLE)
def test_a_flag_without_effect_is_refused_and_a_files_value_is_not(name):
    idle, remedy = IDLE[name]
    with pytest.raises(InputError, match=f"{name}="):
        Settings.resolve(None, idle)
    others = {key: value for key, value in idle.items() if key != name}
    with pytest.raises(InputError, match=f"{name}="):
        Settings.resolve(
            others, {name: idle[name]}
        )  # it matters where the flag is, not where the others are
    assert Settings.resolve(idle, {}) == Settings.resolve({name: idle[name]}, others | {name: None})
    assert Settings.resolve(None, idle | remedy).flat()[name] == idle[name]
