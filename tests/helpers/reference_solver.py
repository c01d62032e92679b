"""A slow and readable solver, with which the fast one of training/sgd.py must agree.

It loops over clients, and leaves gradients to autograd and the step to torch.optim.SGD. The pull is
the proximal step as the docstring of training/proximal.py writes it, line by line. Dropout of
columns is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedhb.clients.clients import Clients
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull


def train(
    network: Network,
    likelihood: Likelihood,
    start: Weights,
    clients: Clients,
    plan: Plan,
    rng: Randomness,
    penalty: Penalty,
    example_weights: Tensor | None = None,
) -> tuple[Weights, dict[str, Tensor]]:
    """Train the clients one after another; return their weights, and their mean losses and scores.

    `example_weights` multiplies the loss of each example, client after client.
    """
    assert penalty.p_do == 1.0
    trained, reports, before = [], [], 0
    for c in range(len(clients)):
        size = int(clients.sizes[c])
        weights = torch.ones(size) if example_weights is None else example_weights[before:][:size]
        before += size
        client = Client(network, likelihood, start, c, plan, penalty)
        reports.append(client.train(clients, plan, rng, weights))
        trained.append(client.vectors())
    theta, head, buffers = (torch.stack(vectors) for vectors in zip(*trained, strict=True))
    loss, score = torch.tensor(reports, dtype=torch.float64).T
    return Weights(theta, head, buffers), {"loss": loss, "score": score}


class Client:
    """The module of one client, its optimiser, and what pulls its weights."""

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        start: Weights,
        c: int,
        plan: Plan,
        penalty: Penalty,
    ):
        self.c, self.network, self.likelihood = c, network, likelihood
        self.module = copy.deepcopy(network.module)
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        inside = network.head_name + "." if network.head_name else " "
        self.body = [p for n, p in named if not n.startswith(inside)]
        self.head = [p for n, p in named if n.startswith(inside)]
        self.buffers = [b for b in self.module.buffers() if b.is_floating_point()]
        put(start.theta[c], self.body)
        put(start.head[c], self.head)
        put(start.buffers[c], self.buffers)
        self.pulls = [(self.body, penalty.pull)]
        if plan.train_head:
            self.pulls.append((self.head, penalty.head_pull))
        self.trained = [p for tensors, _ in self.pulls for p in tensors]
        self.optimiser = torch.optim.SGD(self.trained, lr=plan.lr, momentum=plan.momentum)

    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return vector(self.body), vector(self.head), vector(self.buffers)

    def train(
        self, clients: Clients, plan: Plan, rng: Randomness, weights: Tensor
    ) -> tuple[float, float]:
        """Train by the plan; return the mean loss and score over the last epoch."""
        i = int(clients.ids[self.c])
        order, noise = rng(i, "order"), rng(i, "noise")
        x, y = clients.train.examples(self.c)
        x = self.network.scaling(x, self.network.dtype)
        self.module.train()
        for _ in range(plan.epochs):
            loss = score = 0.0
            shuffled = torch.randperm(len(x), generator=order)
            for rows in minibatches(shuffled, plan.batch_size, self.network.has_batch_norm):
                with torch.random.fork_rng(devices=[]):  # a module may draw random numbers
                    torch.manual_seed(int(torch.randint(2**31, (), generator=noise)))
                    outputs = self.module(x[rows]).unsqueeze(0)
                target = y[rows].unsqueeze(0)
                losses = self.likelihood.loss(outputs, target)[0]
                loss += float(losses.detach().sum())
                score += float(self.likelihood.score(outputs.detach(), target).sum())
                self.step((weights[rows] * losses).sum() / len(rows), plan)
        return loss / len(x), score / len(x)

    def step(self, loss: Tensor, plan: Plan) -> None:
        self.optimiser.zero_grad()
        loss.backward()
        for parameter in self.trained:  # outputs may not need all weights
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        targets = [self.target(tensors, pull) for tensors, pull in self.pulls]
        self.optimiser.step()  # v <- momentum v + g;  m' <- m - lr v
        for (tensors, pull), target in zip(self.pulls, targets, strict=True):
            if pull is not None:
                self.pull(tensors, self.mu(pull), target, plan)

    def pull(self, tensors: list[nn.Parameter], mu: Tensor, target: Tensor, plan: Plan) -> None:
        """Do m+ <- (m' + lr mu target) / (1 + lr mu) and v <- v + (m' - m+) / lr."""
        lr = plan.lr
        free = vector(tensors)
        pulled = (free + lr * mu * target) / (1 + lr * mu)
        put(pulled, tensors)
        if plan.momentum:
            velocities = [self.optimiser.state[p]["momentum_buffer"] for p in tensors]
            put(vector(velocities) + (free - pulled) / lr, velocities)

    def target(self, tensors: list[nn.Parameter], pull: Pull | None) -> Tensor:
        """Return where the weights are pulled: one place, one of each client, or one that moves."""
        if pull is None:
            return torch.zeros(0)
        if pull.shares is not None:
            return (pull.shares(vector(tensors).unsqueeze(0)) @ pull.target)[0]
        return pull.target if pull.target.ndim == 1 else pull.target[self.c]

    def mu(self, pull: Pull) -> Tensor:
        row = pull.mu[self.c if len(pull.mu) > 1 else 0]
        return row.repeat_interleave(torch.tensor(pull.layers)) if pull.layers else row


def minibatches(order: Tensor, size: int, merge_single: bool) -> Iterator[Tensor]:
    """Yield the examples of each minibatch; batch norm cannot train on a last batch of one."""
    parts = list(order.split(size))
    if merge_single and len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def vector(tensors: list) -> Tensor:
    """Return the tensors as one vector."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def put(values: Tensor, tensors: list) -> None:
    """Set the tensors to the parts of a vector."""
    parts = values.split([tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data.copy_(part.view(tensor.shape))
