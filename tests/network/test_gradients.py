"""Gradients of C clients' losses, put where the solver wants them: keep place + scale gradient."""

from __future__ import annotations

import pytest
import torch
from builders import CLASSES, FEATURES, NETWORKS, problem, seeded

from fedhb.likelihood import Categorical, slope
from fedhb.network.gradients import Bound
from fedhb.network.vectors import Network, Weights

CLIENTS, EXAMPLES = 3, 4


@pytest.mark.parametrize("make", ["mlp", "batch norm"])
@pytest.mark.parametrize(("keep", "scale"), [(0.0, 1.0), (0.9, 1.0), (1.0, -0.1)])
def test_a_place_keeps_its_share_and_takes_up_the_gradient(make, keep, scale):
    network = Network(NETWORKS[make]())
    with seeded(1):
        noise = torch.randn(CLIENTS, network.num_params, dtype=torch.float64)
        before = torch.randn(CLIENTS, network.num_params, dtype=torch.float64)
        x = torch.randn(CLIENTS, EXAMPLES, FEATURES, dtype=torch.float64)
        y = torch.randint(CLASSES, (CLIENTS, EXAMPLES))
    theta = network.theta + 0.1 * noise
    head, buffers = (v.expand(CLIENTS, -1).clone() for v in (network.head, network.buffers))
    likelihood = Categorical(CLASSES)

    def descend(outputs, client):
        return slope(likelihood, outputs, y if client is None else y[client : client + 1])

    def written(keep, scale, place):
        weights = Weights(theta.clone(), head.clone(), buffers.clone())
        bound = Bound(network, weights, place, None)
        counts, seeds = [EXAMPLES] * CLIENTS, [0] * CLIENTS
        seeds = [] if network.batches_clients else seeds
        bound.differentiate(x, descend, counts=counts, seeds=seeds, keep=keep, scale=scale)
        return place

    gradient = written(0.0, 1.0, torch.full_like(before, torch.nan))  # keep = 0 writes anew
    assert torch.isfinite(gradient).all() and gradient.abs().max() > 0
    place = written(keep, scale, before.clone())
    torch.testing.assert_close(place, keep * before + scale * gradient, rtol=1e-12, atol=1e-14)


def test_each_client_has_the_gradient_of_its_own_loss():
    prob = problem()
    network, likelihood = prob.network, prob.likelihood
    x = torch.randn(2, EXAMPLES, FEATURES, dtype=torch.float64)
    y = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    theta = torch.stack([network.theta, 2.0 * network.theta])
    place = torch.zeros_like(theta)
    weights = Weights(theta, network.head.expand(2, -1), network.buffers.expand(2, -1))
    Bound(network, weights, place, None).differentiate(
        x, lambda outputs, client: slope(likelihood, outputs, y), counts=[EXAMPLES] * 2, seeds=[]
    )
    step = 1e-6
    direction = torch.ones_like(network.theta)
    for c in range(2):
        ends = []
        for sign in (1.0, -1.0):
            moved = Weights(theta[c : c + 1] + sign * step * direction, network.head[None],
                            network.buffers[None])  # fmt: skip
            outputs = network.outputs(moved, x[c : c + 1])
            ends.append(likelihood.loss(outputs, y[c : c + 1]).sum().item())
        slope_along = (ends[0] - ends[1]) / (2 * step)
        assert place[c].sum().item() == pytest.approx(slope_along, rel=1e-5)
