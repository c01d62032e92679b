"""Local training of many clients at once: each as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import CLASSES, PLAN, batch_norm_net, clients, initial, mlp, same_bits

from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness
from fedhb.training.batches import batches
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import Sgd, train

RNG = Randomness(5, 3)


def pull(network, count):
    return Pull(
        torch.linspace(0.1, 0.5, count, dtype=torch.float64).unsqueeze(1), network.theta + 0.1
    )


def result(network, who, rng=RNG, plan=PLAN, **penalty):
    weights, reports = train(
        network,
        Categorical(CLASSES),
        initial(network, len(who)),
        who,
        plan,
        rng,
        Penalty(**penalty),
    )
    return {"theta": weights.theta, "head": weights.head, "buffers": weights.buffers} | reports


@pytest.mark.parametrize("order", [[2, 5, 0, 3, 1, 4], [0, 1, 2, 3, 4, 5], [4, 2, 1]])
@pytest.mark.parametrize("make", [mlp, batch_norm_net])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_out_of_batches_stands_still(momentum, make, order):
    """In a group of ragged clients each ends where it ends alone: weights, momentum (two epochs)
    and buffers.
    """
    network, who, plan = (
        Network(make()),
        clients().select(order),
        replace(PLAN, momentum=momentum, train_head=True),
    )
    together = result(network, who, plan=plan)
    for k in range(len(who)):
        alone = result(network, who.select([k]), plan=plan)
        for key, value in alone.items():
            torch.testing.assert_close(
                together[key][k],
                value[0],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda t, key=key: f"{key}: {t}",
            )


def test_the_pull_on_ragged_clients_is_each_clients_own():
    network, who = Network(mlp()), clients()
    strengths = pull(network, len(who))
    together = result(network, who, pull=strengths)
    for k in range(len(who)):
        alone = result(
            network, who.select([k]), pull=Pull(strengths.mu[k : k + 1], strengths.target)
        )
        torch.testing.assert_close(together["theta"][k], alone["theta"][0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together["theta"], result(network, who)["theta"])


@pytest.mark.parametrize("make", [mlp, batch_norm_net])
def test_padding_does_not_matter(make, monkeypatch):
    network, who = Network(make()), clients()
    before = result(network, who)
    padded = 0

    def other_padding(*args, **kwargs):
        nonlocal padded
        for batch in batches(*args, **kwargs):
            for a, n in enumerate(batch.counts):
                padded += batch.x.shape[1] - n
                batch.x[a, n:] = 77.0
                batch.y[a, n:] = 1
            yield batch

    monkeypatch.setattr("fedhb.training.sgd.batches", other_padding)
    after = result(network, who)
    assert padded > 0 and same_bits(before, after)


def test_momentum_stands_still_too():
    """A step for some clients only moves neither the weights nor the velocity of the others."""
    network, who = Network(mlp()), clients((4, 4, 4))
    weights = initial(network, 3)
    solver = Sgd(network, weights, PLAN)
    first, second = list(batches(who, PLAN, RNG))
    solver.step(first, Categorical(CLASSES))
    theta, velocity = weights.theta.clone(), solver._parts[0].velocity.clone()
    rows = torch.tensor([2, 0])
    part = replace(
        second,
        active=rows,
        x=second.x[rows],
        y=second.y[rows],
        counts=[4, 4],
        generators=second.generators[:2],
    )
    solver.step(part, Categorical(CLASSES))
    assert torch.equal(weights.theta[1], theta[1]) and torch.equal(
        solver._parts[0].velocity[1], velocity[1]
    )
    assert not torch.equal(weights.theta[0], theta[0]) and not torch.equal(
        weights.theta[2], theta[2]
    )


def test_plain_training_is_torch_sgd():
    """One client without a prior: the weights of torch.optim.SGD with momentum on the same
    minibatches.
    """
    network, who = Network(mlp()), clients((11,))
    ours = result(network, who)
    module_ = mlp()
    module_.head.requires_grad_(False)
    optimiser = torch.optim.SGD(
        [p for p in module_.parameters() if p.requires_grad], lr=PLAN.lr, momentum=PLAN.momentum
    )
    losses = []
    for batch in batches(who, PLAN, RNG):
        loss = torch.nn.functional.cross_entropy(module_(batch.x[0].double()), batch.y[0])
        if batch.last_epoch:
            losses += [loss.item()] * len(batch.y[0])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(
        ours["theta"][0], Network(module_, head="head").constants()["theta"], rtol=1e-12, atol=1e-12
    )
    assert ours["loss"].item() == pytest.approx(np.mean(losses), rel=1e-12)
    assert ours["examples"].item() == 11


def test_the_head_is_trained_only_when_asked():
    network, who = Network(mlp()), clients()
    still = result(network, who)["head"]
    assert torch.equal(still, network.head.expand_as(still))
    weights, _ = train(
        network,
        Categorical(CLASSES),
        initial(network, len(who)),
        who,
        replace(PLAN, train_head=True),
        RNG,
    )
    assert (weights.head != network.head).any(1).all()


class Writes(torch.nn.Module):
    """A network that changes its input."""

    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def forward(self, x):
        return self.inside(x.sub_(0.5))


@pytest.mark.parametrize("standardise", [True, False])
def test_a_module_may_write_into_its_input(standardise):
    """The networks that share a batch, and the next epoch, get it as it was."""
    pairs = [(np.arange(12.0).reshape(3, 4), np.arange(3) % CLASSES)]
    who = Clients.from_arrays(pairs, num_classes=CLASSES, standardise=standardise)
    network = Network(Writes(), scaling=who.scaling)
    (batch,) = list(batches(who, replace(PLAN, epochs=1), RNG))
    before = network.prepare(batch.x).clone()
    first = batch.inputs(network)
    assert batch.inputs(network) is first
    first.sub_(0.5)
    assert torch.equal(batch.inputs(network), before)
