"""Wrong input to a run that predicts, personalises itself or is loaded: an InputError names what
is wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from builders import CLASSES, FEATURES, arrays, clients, mlp
from quick_fit import fit
from torch import nn

import fedhb
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import Categorical

X, Y = np.zeros((3, FEATURES)), np.array([0, 1, 2])


def test_loading_what_is_no_run(tmp_path):
    with pytest.raises(InputError, match=r"absent.*problem\.json"):
        fedhb.load(tmp_path / "absent")
    run = tmp_path / "run"
    fit(out=run)
    with pytest.raises(InputError, match=r"load\(path, model="):
        fedhb.load(run)
    with pytest.raises(InputError, match="architecture"):
        fedhb.load(run, model=nn.Sequential(nn.Linear(FEATURES, 9), nn.Linear(9, CLASSES)))
    content = (run / "problem.json").read_text()
    for damaged in (content[:50], "[]", "null", ""):
        (run / "problem.json").write_text(damaged)
        with pytest.raises(InputError, match=r"problem\.json"):
            fedhb.load(run, model=mlp(torch.float32))


def test_a_likelihood_of_ones_own_is_asked_for(tmp_path):
    class Own(Categorical):
        pass

    fit(likelihood=Own(CLASSES), out=tmp_path / "run")
    with pytest.raises(InputError, match=r"load\(path, likelihood="):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32))
    loaded = fedhb.load(tmp_path / "run", model=mlp(torch.float32), likelihood=Own(CLASSES))
    assert isinstance(loaded.problem.likelihood, Own)


@pytest.fixture(scope="module")
def run() -> Any:
    return fit()


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.zeros((2, 3)), r"\(2, 3\).*\[n, 4\]"),
        (np.zeros(4), r"inputs.*\(4,\)"),
        (np.full((2, 4), np.nan), "inputs.*row 0, column 0"),
        (np.full((2, 4), "a"), "inputs.*<U1"),
        (np.zeros((2, 4), complex), "inputs.*complex128"),
    ],
)
def test_inputs_of_predict_and_personalise(run, x, says):
    with pytest.raises(InputError, match=says):
        run.predict(x)
    with pytest.raises(InputError, match=says):
        run.personalise(x, np.zeros(len(x), int))


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (np.array([0, 1]), "3 inputs.*2 targets"),
        (np.array([0, 1, 3]), r"0\.\.3"),
        (np.array([0, 1, -1]), r"-1\.\.1"),
        (np.array([0.5, 1.0, 2.0]), "float64"),
        (np.array(["a", "b", "c"]), "<U1"),
        (np.zeros((3, 1), int), r"shape \(3, 1\)"),
    ],
)
def test_targets_of_personalise(run, y, says):
    with pytest.raises(InputError, match=says):
        run.personalise(X, y)


def test_targets_of_a_personalised_regression():
    who = Clients.from_arrays([(x, x[:, :2]) for x, _ in arrays()])
    regression = fit(mlp(torch.float32, outputs=4), who)
    with pytest.raises(InputError, match=r"shape \(3,\)"):
        regression.personalise(X, np.zeros(3))
    with pytest.raises(InputError, match=r"targets.*row 1, column 0"):
        regression.personalise(X, np.array([[0, 0], [np.nan, 0], [0, 0]]))


@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": -1}, {"lr": 0.0}, {"lr": math.nan}])
def test_settings_of_personalise(run, options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"{name}={value}"):
        run.personalise(X, Y, **options)


def test_nothing_to_personalise_on(run):
    with pytest.raises(InputError, match=r"0 inputs.*0 targets"):
        run.personalise(X[:0], Y[:0])


def test_nothing_to_predict(run):
    assert run.predict(X[:0]).shape == (0, CLASSES)


def test_evaluating_a_split_that_is_not_there(run):
    with pytest.raises(InputError, match="split='validation'"):
        run.evaluate(clients(), "validation")
