"""Dropout of columns (eq:spiky2): how often a column is dropped, and what a step does with it."""

from __future__ import annotations

import copy

import pytest
import torch
from columns_of import members
from problems import RNG, initial, labelled, mlp, plan_of
from torch import nn
from torch.nn import functional

from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train


def one_step(network: Network, clients: Clients, p_do: float, pull: Pull | None = None) -> Weights:
    """One step without momentum on all examples."""
    plan = plan_of(batch_size=20, lr=0.1, momentum=0.0, train_head=True)
    return train(
        network,
        Categorical(3),
        initial(network, len(clients)),
        clients,
        plan,
        RNG,
        Penalty(pull, p_do=p_do),
    )[0]


@pytest.mark.parametrize("wrap", [False, True])
def test_a_step_is_that_of_the_thinned_network_and_dropped_weights_stay(wrap: bool) -> None:
    module = mlp(4, 5, 4, 3)
    if wrap:  # evaluated client by client
        module = nn.Sequential(module, nn.Softmax(-1))
    clients, network = labelled(20, 15, 20), Network(module)
    assert network.batches_clients != wrap
    after = one_step(network, clients, p_do=0.5)
    groups, masks = members(network.columns), []
    for c in range(len(clients)):
        moved = after.theta[c] != network.theta
        mask = torch.ones(network.num_params, dtype=torch.float64)
        for group in groups:
            if not moved[group].any():
                mask[group] = 0.0
        masks.append(mask)
        thinned = copy.deepcopy(module)
        names = [n for n, _ in thinned.named_parameters()]
        assert names[-2:] == [f"{network.head_name}.weight", f"{network.head_name}.bias"]
        full = torch.cat([network.theta * mask, network.head])
        nn.utils.vector_to_parameters(full, thinned.parameters())
        x, y = clients.train.examples(c)
        functional.cross_entropy(thinned(x.double()), y).backward()
        gradient = torch.cat([p.grad.flatten() for p in thinned.parameters()])
        expected = torch.cat([network.theta, network.head]) - 0.1 * gradient * torch.cat(
            [mask, torch.ones_like(network.head)]
        )
        # The mean of twenty small gradients, in another order.
        torch.testing.assert_close(
            torch.cat([after.theta[c], after.head[c]]), expected, rtol=0, atol=1e-15
        )
        assert torch.equal(after.theta[c][mask == 0], network.theta[mask == 0])
    dropped = [int((m == 0).sum()) for m in masks]
    assert all(0 < n < len(torch.cat(members(network.columns))) for n in dropped)
    assert not torch.equal(masks[0], masks[1])  # each client has a mask of its own


def test_the_pull_reaches_dropped_weights() -> None:
    clients, network = labelled(20, 15), Network(mlp(4, 5, 3))
    mu, target = torch.full((1, 1), 0.7, dtype=torch.float64), torch.zeros_like(network.theta)
    free, pulled = (
        one_step(network, clients, p_do=0.5, pull=pull) for pull in (None, Pull(mu, target))
    )
    # The same masks; then the proximal step to zero on every coordinate. Some roundings.
    torch.testing.assert_close(pulled.theta, free.theta / (1 + 0.1 * 0.7), rtol=1e-14, atol=0)
