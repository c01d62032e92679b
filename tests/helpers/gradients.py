"""A network's gradients by plain torch, and tests' random inputs."""

from __future__ import annotations

import torch
from builders import seeded
from torch import nn
from torch.nn import functional

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few terms in another order


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(clients, batch, classes=3):
    return torch.randint(classes, (clients, batch), generator=torch.Generator().manual_seed(9))


def cross_entropy(y):
    """The slope that `differentiate` asks for: of the clients' mean losses, all of them or one
    client's alone.
    """

    def slope(outputs, client):
        target = y if client is None else y[client : client + 1, : outputs.shape[1]]
        outputs = outputs.clone().requires_grad_()
        each = functional.cross_entropy(outputs.flatten(0, 1), target.flatten(), reduction="none")
        return torch.autograd.grad(each.view(target.shape).mean(1).sum(), outputs)[0]

    return slope


def gradients(network, weights, x, y, train_head=True, counts=None, seeds=None):
    count, batch = y.shape
    body = torch.full_like(weights.theta, torch.nan)  # whatever is not written stays NaN
    head = torch.full_like(weights.head, torch.nan) if train_head else None
    bound = network.bind(weights, body, head)
    bound.differentiate(
        x, cross_entropy(y), counts=counts or [batch] * count, seeds=seeds or list(range(count))
    )
    return body, head


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module, before):
    after = module.state_dict()
    return before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


class TwoHeads(nn.Module):
    """Layers that do not stand in the order of their use, a parameter of its own, a scalar, and
    buffers of several kinds.
    """

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten())
        self.offset = nn.Parameter(torch.zeros(6))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return (
            self.extra(self.out(self.body(x.unsqueeze(1)) * self.scale + self.offset))
            / self.temperature
        )


def two_heads():
    with seeded():
        return TwoHeads().double()
