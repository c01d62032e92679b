"""`fedhb.fit`: its arguments, its defaults, and what it leaves untouched."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import CLASSES, FEATURES, arrays, clients, mlp, seeded
from fitted import X, fit
from torch import nn

import fedhb
from fedhb.algorithms import Plan
from fedhb.clients.clients import Clients
from fedhb.errors import InputError


def test_the_same_seed_gives_the_same_run_whatever_was_drawn_before():
    torch.manual_seed(0)
    first = fit(seed=4)
    torch.rand(5)
    state = torch.get_rng_state()
    second = fit(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first.predict(X), second.predict(X))
    assert not np.allclose(first.predict(X), fit(seed=5).predict(X))
    assert json.dumps(first.result["global"]) == json.dumps(second.result["global"])


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit(rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_given_model_is_not_trained():
    model = mlp(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = fit(model, None, fedhb.FedAvg(), rounds=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(run.state.server["theta"], run.problem.network.theta)


@pytest.mark.parametrize("name", ["empirical-bayes", "mixture", "fedavg", "fedprox", "fedbabu"])
def test_every_algorithm_learns_and_personalises(name):
    """Three classes with means far apart, of which some clients name two the other way round:
    chance is a third.
    """
    rng = np.random.default_rng(0)
    means = 3.0 * rng.normal(size=(CLASSES, FEATURES))

    def pair(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, CLASSES, n)
        swapped = np.array([1, 0, 2]) if k == 0 else np.arange(3)
        return means[y] + rng.normal(size=(n, FEATURES)), swapped[y]

    train, test = ([pair(k, 30) for k in range(6)] for _ in range(2))
    who = Clients.from_arrays(train, test)
    algorithm = fedhb.algorithms.build(
        name, {"kl_weight": 0.01} if name in ("empirical-bayes", "mixture") else {}
    )
    options = {
        "rounds": 20,
        "fraction": 1.0,
        "batch_size": 10,
        "personal_lr": 0.1,
        "personal_epochs": 20,
    }
    with seeded():
        model = fedhb.nets.mlp((FEATURES,), CLASSES, hidden=32)
    result = fit(model, who, algorithm, **options).result
    assert result["global"]["accuracy"] > 0.75 and result["personalised"]["accuracy"] > 0.85
    odd = result["per_client"]
    assert odd["global_accuracy"][0] < 0.6 < 0.75 < odd["personalised_accuracy"][0]


def test_fit_takes_the_algorithms_own_training(monkeypatch):
    monkeypatch.setattr(
        fedhb.FedBABU,
        "training",
        {"lr": 0.02, "momentum": 0.5, "personal_lr": 0.3, "personal_epochs": 2},
    )
    values = {"lr": None, "momentum": None, "personal_lr": None, "personal_epochs": None}
    own = fit(None, None, fedhb.FedBABU(), **values)
    assert own.records[0]["lr"] == 0.02
    assert (own.personal_plan.lr, own.personal_plan.epochs, own.personal_plan.momentum) == (
        0.3,
        2,
        0.5,
    )
    given = fit(None, None, fedhb.FedBABU(), **fedhb.FedBABU.training)
    assert torch.equal(own.state.server["theta"], given.state.server["theta"])
    assert fit(None, None, fedhb.FedBABU(), **values | {"lr": 0.04}).records[0]["lr"] == 0.04


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"algorithm": fedhb.NIW}, "algorithm=.*NIW.*instance"),
        ({"algorithm": "empirical-bayes"}, "algorithm='empirical-bayes'.*instance"),
        ({"model": nn.Linear}, "module"),
        ({"rounds": 2.5}, "rounds=2.5.*whole"),
        ({"rounds": True}, "rounds=True.*whole"),
        ({"lr": "a"}, "lr='a'.*number"),
        ({"callbacks": fedhb.Callback}, "list"),
        ({"resume": True}, "resume=True.*out"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(given, says):
    with pytest.raises(InputError, match=says):
        fit(**given)


def test_numpys_numbers_are_numbers():
    assert fit(rounds=np.int64(1), lr=np.float32(0.1), seed=np.int32(3)).state.done == 1


def test_every_name_is_completed():
    assert set(fedhb.__all__) <= set(dir(fedhb))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (fedhb.EmpiricalBayes(kl_weight="much"), "empirical-bayes.kl_weight='much'.*number"),  # type: ignore[arg-type]
        (fedhb.EmpiricalBayes(num_samples=1.5), "empirical-bayes.num_samples=1.5.*whole"),  # type: ignore[arg-type]
        (fedhb.NIW(dof="half"), "niw.dof='half'.*full.*per_coordinate"),  # type: ignore[arg-type]
        (fedhb.EmpiricalBayes(begin="nearest"), "empirical-bayes.begin='nearest'.*global.*last"),
        (fedhb.Mixture(sigma2=0.0), "mixture.sigma2=0.0.*positive"),
        (
            fedhb.FedPA(burn_in=1.5),
            "fedpa.burn_in=1.5.*0.0.*1.0",
        ),
        (fedhb.FedProx(mu=math.nan), "fedprox.mu=nan.*0.0"),
    ],
)
def test_settings_of_algorithms_have_bounds(algorithm, says):
    with pytest.raises(InputError, match=says):
        fit(None, None, algorithm)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda run: fedhb.fit(mlp(torch.float32), [(X, X)]),
            "list.*fedhb.Clients",
        ),
        (
            lambda run: run.evaluate(clients(), "tset"),
            "split='tset'",
        ),
        (
            lambda run: run.evaluate(clients(), "validation"),
            "split='validation'",
        ),
        (
            lambda run: run.personalise(*arrays()[0], epochs=1.5),
            "epochs=1.5.*whole",
        ),
    ],
)
def test_what_makes_no_sense_at_the_front_door_is_told(call, says):
    with pytest.raises(InputError, match=says):
        call(fit())


def test_weights_that_the_outputs_do_not_need_stay_as_they_are():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.body, self.out = (
                nn.Linear(3, 3),
                nn.Linear(FEATURES, 16),
                nn.Linear(16, CLASSES),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(torch.tanh(self.body(x)))
            return found

    net = Spare()
    run = fit(net, None, fedhb.FedAvg(), lr=0.1)
    (slot,) = (s for s in run.problem.network.body_slots if s.name == "spare.weight")
    torch.testing.assert_close(slot.of(run.state.server["theta"]), net.spare.weight)
    assert not torch.equal(run.state.server["theta"], run.problem.network.theta)


def test_holdout_clients_are_like_those_that_train():
    others: list[tuple[Any, str]] = [
        (
            Clients.from_arrays([(np.zeros((4, FEATURES + 1)), np.array([0, 1, 0, 1]))] * 2),
            "inputs",
        ),
        (
            Clients.from_arrays([(np.zeros((4, FEATURES)), np.array([0.5, 1, 0, 1]))] * 2),
            "targets",
        ),
        (
            Clients.from_arrays(
                [(np.zeros((4, FEATURES)), np.arange(4))] * 2, num_classes=CLASSES + 5
            ),
            "classes",
        ),
    ]
    for who, says in others:
        who = replace(who, ids=who.ids + 100)
        with pytest.raises(InputError, match=f"holdout clients.*{says}"):
            fit(holdout=who, evaluate_on="train")
        with pytest.raises(InputError, match="as in training"):
            fit().evaluate(who, "train")


def test_from_arrays_to_a_prediction():
    """The README's way: one (x, y) pair per client, images as they are stored."""
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8), rng.integers(0, 4, 6))
        for _ in range(3)
    ]
    who = Clients.from_arrays(pairs, pairs, num_classes=4, standardise=True, ids=[7, 3, 5])
    run = fit(
        fedhb.nets.convnet((1, 8, 8), 4), who, fedhb.EmpiricalBayes(begin="last"), fraction=1.0
    )
    assert run.predict(pairs[0][0]).shape == (6, 4)
    assert sorted(run.state.store.memories) == [3, 5, 7]
    assert run.personalise(*pairs[0]).predict(pairs[0][0]).shape == (6, 4)


def test_clients_train_and_personalise_as_they_were_told():
    plans: dict[str, list[Any]] = {"train": [], "personalise": []}

    class Spy(fedhb.FedBABU):
        def local_update(
            self, problem: Any, received: Any, clients: Any, memory: Any, plan: Any, rng: Any
        ) -> Any:
            plans["train"].append(plan)
            return super().local_update(problem, received, clients, memory, plan, rng)

        def personalise(
            self, problem: Any, server: Any, clients: Any, memory: Any, plan: Any, rng: Any
        ) -> Any:
            plans["personalise"].append(plan)
            return super().personalise(problem, server, clients, memory, plan, rng)

    options = {
        "lr": 0.2,
        "momentum": 0.5,
        "local_epochs": 2,
        "batch_size": 3,
        "personal_lr": 0.01,
        "personal_epochs": 4,
    }
    run = fit(None, None, Spy(), rounds=8, **options)
    rates = [0.2] * 4 + [0.02] * 2 + [0.002] * 2
    assert (
        [plan.lr for plan in plans["train"]]
        == pytest.approx(rates)
        == [record["lr"] for record in run.records]
    )
    assert {(p.epochs, p.batch_size, p.momentum, p.train_head) for p in plans["train"]} == {
        (2, 3, 0.5, False)
    }
    assert set(plans["personalise"]) == {Plan(4, 3, 0.01, 0.5, True)}
    plans["train"].clear()
    fit(None, None, Spy(update="full"), rounds=1)
    assert all(plan.train_head for plan in plans["train"])


def test_progress_is_shown_on_the_error_stream(capfd):
    fit(progress=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "empirical-bayes seed 0: round 3/3" in captured.err
