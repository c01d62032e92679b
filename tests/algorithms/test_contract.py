"""Parts that all algorithms share: personal posteriors, and clients that remember nothing."""

from __future__ import annotations

import torch
from builders import clients, mlp, perturbed, problem

from fedhb.algorithms.contract import Personalised, Stateless


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
    assert Stateless().remember(problem(), clients()) == {}
