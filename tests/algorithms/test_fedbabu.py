"""FedBABU: its head is the initial one."""

from __future__ import annotations

import torch
from problems import TRAINING, labelled, mlp, normal
from torch import nn

import fedhb
from fedhb.algorithms import FedBABU


def test_fedbabus_head_is_the_initial_one_whatever_it_learns() -> None:
    module, clients, x = mlp(4, 5, 3), labelled(9, 6, 4), normal(6, 4, seed=1)
    run = fedhb.fit(module, clients, FedBABU(), **TRAINING)
    network, server = run.problem.network, run.state.server
    assert torch.equal(
        network.head, torch.cat([p.detach().flatten() for p in module[-1].parameters()])
    )
    assert (server["theta"] - network.theta).abs().max() > 1e-2
    # Prediction: the new body under the old head.
    nn.utils.vector_to_parameters(server["theta"], module[0].parameters())
    predicted = run.algorithm.predict(run.problem, server, x, run.rng)
    torch.testing.assert_close(
        predicted, module(x).softmax(-1).detach(), rtol=0, atol=1e-14
    )  # products in another order
