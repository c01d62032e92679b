"""What all algorithms share: personal posteriors, and declarations that are kept."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from builders import CASES, clients, mlp, perturbed, plan, problem

from fedhb.algorithms import FedAvg
from fedhb.algorithms.contract import (
    AlgorithmBase,
    ClientId,
    Measurements,
    NonNegative,
    NumExamples,
    Personalised,
    Release,
    Shares,
    Vector,
    declared_release,
)
from fedhb.seeding import Randomness


def test_prediction_mixes_the_networks_by_their_weights():
    prob = problem(mlp())
    one, two = (perturbed(prob.network, 3, seed) for seed in (1, 2))
    shares = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]], dtype=torch.float64)
    parts = [torch.stack(pair, 1) for pair in zip(*(vars_of(w) for w in (one, two)), strict=True)]
    posterior = Personalised(prob, *parts, shares)
    x = torch.stack([clients().test.examples(k)[0] for k in range(3)])
    p, q = (Personalised.point(prob, weights).predict(x) for weights in (one, two))
    mixed = shares[:, :1, None] * p + shares[:, 1:, None] * q
    torch.testing.assert_close(posterior.predict(x), mixed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(posterior.client(1).predict(x[1:2])[0], mixed[1])


def vars_of(weights):
    return weights.theta, weights.head, weights.buffers


def test_a_point_is_one_network_of_weight_one():
    prob = problem(mlp())
    weights = perturbed(prob.network, 2)
    arrays = Personalised.point(prob, weights).arrays()
    assert arrays["weights"].tolist() == [[1.0], [1.0]]
    assert torch.equal(arrays["theta"][:, 0], weights.theta)


def test_clients_remember_nothing_unless_an_algorithm_says_so():
    assert AlgorithmBase().remember(problem(), clients()) == {}


def test_a_report_shows_nothing_of_a_posterior_unless_an_algorithm_says_so():
    base, prob = AlgorithmBase(), problem()
    theta = prob.network.theta.unsqueeze(0)
    assert base.describe(prob, {}) == base.describe_personal(prob, {}, theta) == {}
    assert base.describe_examples(prob, {}, clients().test, 10) == {} and base.phases == ()


@pytest.mark.parametrize("name", CASES)
def test_answers_are_what_the_algorithm_declares(name):
    algorithm = CASES[name]
    who = clients((20,)) if algorithm.pools else clients()
    prob, rng = problem(who=who), Randomness(0, 1)
    received = algorithm.broadcast(algorithm.start(prob, rng), who.ids.tolist())
    assert all(len(received[key]) == len(who) for key in algorithm.each if key in received)
    memory = algorithm.remember(prob, who)
    answers, _ = algorithm.local_update(prob, received, who, memory, plan(algorithm), rng)
    assert answers.keys() <= algorithm.answer.keys()
    for key, value in answers.items():
        kind = algorithm.answer[key]
        assert len(value) == len(who), key
        if isinstance(kind, Vector) and kind.relative_to is not None and algorithm.sends:
            sent = received[kind.relative_to]
            assert value.shape[1:] == sent.shape[kind.relative_to in algorithm.each :], key
        if isinstance(kind, Shares | NonNegative | Measurements):
            assert (value >= 0).all(), key
        if isinstance(kind, Shares):
            torch.testing.assert_close(value.sum(1), torch.ones_like(value[:, 0]))
        if isinstance(kind, NumExamples):
            assert value.tolist() == who.sizes.tolist()
        if isinstance(kind, ClientId):
            assert value.flatten().tolist() == who.ids.tolist()


def test_a_release_is_of_the_class_that_declares_it():
    """A subclass may send other sums."""

    @dataclasses.dataclass(frozen=True)
    class Other(FedAvg):
        pass

    @dataclasses.dataclass(frozen=True)
    class Declares(FedAvg):
        release: ClassVar[Release | None] = Release(withheld=("theta",))

    assert declared_release(FedAvg()) is FedAvg.release is not None
    assert declared_release(Other()) is None
    assert declared_release(Declares()).withheld == ("theta",)
