"""Differences between clients, as a posterior shows them."""

from __future__ import annotations

import numpy as np
import pytest
from observed_runs import evaluation, fit

import fedhb
from fedhb.clients.partition import shards


@pytest.fixture(scope="module")
def clients():
    return shards(fedhb.data.load("digits"), num_clients=6, shards_per_client=3, seed=1)


def test_the_tensors_of_the_gaussian_families_and_the_prototypes_of_a_mixture(clients, tmp_path):
    run = fit(clients, fedhb.EmpiricalBayes(), tmp_path / "empirical-bayes")
    found = evaluation(tmp_path / "empirical-bayes")["posterior"]
    u = run.state.server["V0"].double() / (run.problem.federation.num_examples + 3)
    assert found["prior_deviation"] == pytest.approx(u.sqrt().tolist(), rel=1e-4)
    assert len(found["spread"]) == len(run.problem.network.body_slots) and min(found["spread"]) > 0
    printed = fit(clients, fedhb.NIW(), tmp_path / "niw")
    first = printed.state.server["V0"][: 64 * 8].double().mean() / printed.algorithm.n0(
        printed.problem
    )
    found = evaluation(tmp_path / "niw")["posterior"]
    assert found["prior_deviation"][0] == pytest.approx(first.sqrt().item(), rel=1e-4)
    mixture = fit(clients, fedhb.Mixture(num_prototypes=3), tmp_path / "mixture")
    found = evaluation(tmp_path / "mixture")["posterior"]
    for key in ("responsibilities", "gate"):
        assert np.sum(found[key], axis=1) == pytest.approx(np.ones(6), abs=1e-3)
    r = mixture.state.server["r"]
    assert found["distances"][0][1] == pytest.approx((r[0] - r[1]).norm().item(), rel=1e-3)
    x, y = clients.test.x[clients.test.rows], clients.test.y[clients.test.rows]
    alone = mixture.problem.network.outputs(
        mixture.algorithm.prototypes(mixture.problem, mixture.state.server), x.expand(3, *x.shape)
    )
    right = (alone.argmax(-1) == y)[1, y == 4].double().mean().item()
    assert found["prototype_accuracy"][1][4] == pytest.approx(right, rel=1e-4)


def test_the_spread_is_that_of_the_personal_models(clients, tmp_path):
    run = fit(clients, fedhb.FedAvg(), tmp_path / "x")
    server, plan = run.state.server, run.personal_plan
    personal = run.algorithm.personalise(run.problem, server, clients, {}, plan, run.rng).theta[
        :, 0
    ]
    slot = run.problem.network.body_slots[0]
    deviation = (
        personal[:, slot.start : slot.stop].double().var(0, correction=0).mean().sqrt().item()
    )
    assert evaluation(tmp_path / "x")["posterior"]["spread"][0] == pytest.approx(
        deviation, rel=1e-3
    )
