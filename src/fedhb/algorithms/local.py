"""Local training of C clients at once: stochastic gradient steps, and the prior's pull as a proximal step.

The step, for a loss with gradient g and a penalty mu/2 ||m - target||^2:

    v  <- momentum v + g
    m' <- m - lr v
    m+ <- (m' + lr mu target) / (1 + lr mu)
    v  <- v + (m' - m+) / lr

It is stable for every mu, and bit-equal to plain SGD at mu = 0. Its fixed point is the minimiser of loss plus penalty: the last
line makes the velocity that of the whole objective; without it the penalty would act (1 - momentum) times as strong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhb.algorithms.base import Plan
from fedhb.algorithms.batches import Batch, batches
from fedhb.clients import Clients
from fedhb.likelihood import Likelihood
from fedhb.network import Network, Weights
from fedhb.seeding import Randomness

BLOCK = 2**14
"""Coordinates updated at once: few enough for a step's passes over them to stay in a core's cache."""


@dataclass(frozen=True)
class Pull:
    """The penalty mu/2 ||m - target||^2 of each client, per example.

    Attributes:
        mu: strength [1 or C, 1 or d].
        target: [d] or [C, d], or a function of the current m [A, d] and of who is active that gives a fresh [A, d].
    """

    mu: Tensor
    target: Tensor | Callable[[Tensor, slice | Tensor], Tensor]


class Sgd:
    """Stochastic gradient descent with momentum for the weights of C clients, updated in place.

    Args:
        network: what the weights belong to.
        weights: the starting point; it becomes the result.
        plan: learning rate, momentum, and whether the head is trained.
        pull: the prior's pull on theta, or None.
        head_pull: the same for the head, or None.
        p_do: each column of the body is kept with this probability, drawn anew for every batch and client (eq:spiky2).
    """

    def __init__(
        self,
        network: Network,
        weights: Weights,
        plan: Plan,
        *,
        pull: Pull | None = None,
        head_pull: Pull | None = None,
        p_do: float = 1.0,
    ):
        self.network, self.weights, self.plan, self.p_do = network, weights, plan, p_do
        self.train_head = plan.train_head and weights.head.shape[1] > 0
        self._theta = _Momentum(weights.theta, plan, pull)
        self._head = _Momentum(weights.head, plan, head_pull) if self.train_head else None
        self._drops: dict[torch.Generator, Iterator[Tensor]] = {}
        count = len(weights.theta)
        self._loss, self._score, self._examples = torch.zeros(3, count, dtype=torch.float64, device=weights.theta.device)

    def step(self, batch: Batch, likelihood: Likelihood, y: Tensor | None = None, example_weights: Tensor | None = None) -> None:
        """One step of every active client on its batch; the arguments are those of `gradients`."""
        self.gradients(batch, likelihood, y, example_weights)
        self._theta.step(batch.active)
        if self._head is not None:
            self._head.step(batch.active)

    def gradients(
        self, batch: Batch, likelihood: Likelihood, y: Tensor | None = None, example_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of the active clients' mean losses at their weights; nothing moves but the buffers of batch norm.

        Args:
            batch: inputs, targets, and who is active.
            likelihood: gives the loss of each example.
            y: targets to use instead of the batch's.
            example_weights: multiplies the loss of each example [A, B].

        Returns:
            For theta [A, d], and for the head [A, h] where it is trained; both are written anew by the next call.
        """
        y = batch.y if y is None else y
        active = batch.active
        theta = self.weights.theta[active]  # a view where `active` is a slice
        part = Weights(theta, self.weights.head[active], self.weights.buffers[active])
        counts = torch.tensor(batch.counts, dtype=self.network.dtype, device=theta.device)

        def loss(outputs: Tensor, client: int | None) -> Tensor:
            rows = slice(None) if client is None else slice(client, client + 1)
            width = outputs.shape[1]
            target = y[rows, :width]
            each = likelihood.loss(outputs, target)
            score = likelihood.score(outputs.detach(), target)
            if batch.valid is not None and client is None:
                each, score = each * batch.valid.to(each.dtype), score * batch.valid.to(score.dtype)
            if batch.last_epoch:
                seen = torch.arange(len(self._loss), device=theta.device)[active][rows]
                self._loss[seen] += each.detach().sum(1).double()
                self._score[seen] += score.sum(1).double()
                self._examples[seen] += counts[rows].double()
            if example_weights is not None:
                each = each * example_weights[rows, :width]
            return (each.sum(1) / counts[rows]).sum()

        flat, dropped = theta.view(-1), self._dropped(batch)
        kept = flat[dropped]
        flat[dropped] = 0.0
        # a module that does not know the client axis may draw random numbers of its own
        seeds = [] if self.network.batches_clients else [int(torch.randint(2**31, (), generator=g)) for g in batch.generators]
        gradient = self._theta.gradient[: len(counts)]
        head_gradient = None if self._head is None else self._head.gradient[: len(counts)]
        self.network.value_and_grad(part, batch.x, loss, gradient, head_gradient, counts=batch.counts, seeds=seeds)
        flat[dropped] = kept
        gradient.view(-1)[dropped] = 0.0
        if not isinstance(active, slice):
            self.weights.buffers[active] = part.buffers
        return gradient, head_gradient

    def _dropped(self, batch: Batch) -> Tensor:
        """Coordinates into the flattened [A, d] that this batch's dropout masks set to zero: the thinned m."""
        if self.p_do >= 1.0:
            return torch.zeros(0, dtype=torch.int64)
        parts = []
        for k, generator in enumerate(batch.generators):
            if generator not in self._drops:
                self._drops[generator] = self.network.columns.drops(self.p_do, generator)
            parts.append(next(self._drops[generator]) + k * self.network.num_params)
        return torch.cat(parts)

    def report(self) -> dict[str, Tensor]:
        """Mean loss and score of each client over its last epoch, and its number of examples [C]."""
        return {"loss": self._loss / self._examples, "score": self._score / self._examples}


class _Momentum:
    """The proximal momentum step on one block of coordinates [C, k], in place.

    With a = lr mu / (1 + lr mu) the four lines of the module's docstring are two:

        v <- (1 - a) (momentum v + g) + a / lr (m - target)
        m <- m - lr v
    """

    def __init__(self, value: Tensor, plan: Plan, pull: Pull | None):
        self.value, self.lr, self.momentum, self.pull = value, plan.lr, plan.momentum, pull
        self.velocity = torch.zeros_like(value)
        self.gradient = torch.empty_like(value)  # written anew in every step: memory of this size is dear to allocate
        if pull is not None:
            mu = pull.mu.to(value.dtype)
            self.keep = 1.0 / (1.0 + plan.lr * mu)
            self.decay, self.stiffness = plan.momentum * self.keep, mu * self.keep
            one = mu.numel() == 1
            self.common = tuple(float(c) for c in (self.decay, self.keep, self.stiffness)) if one else None
            shape = (-1, value.shape[1])  # a strength that all coordinates share is one number, seen as a row
            self.keep, self.decay, self.stiffness = (c.expand(*shape) for c in (self.keep, self.decay, self.stiffness))
            self.offset = None if callable(pull.target) else self.stiffness * pull.target

    def step(self, active: slice | Tensor) -> None:
        """One step of the active clients, whose gradients are the first rows of `gradient`."""
        m, v = self.value[active], self.velocity[active]
        pull, target = self.pull, None
        if pull is not None:
            target = pull.target(m, active) if callable(pull.target) else None
            decay, keep, stiffness = (_rows(c, active) for c in (self.decay, self.keep, self.stiffness))
            offset = None if self.offset is None else _rows(self.offset, active)
        for start in range(0, m.shape[1], BLOCK):
            part = (slice(None), slice(start, start + BLOCK))
            v_part, m_part, g_part = v[part], m[part], self.gradient[: len(m)][part]
            if pull is None:
                v_part.mul_(self.momentum).add_(g_part)
            elif self.common is not None:  # one strength for all: numbers are cheaper than rows of them
                decay_, keep_, stiffness_ = self.common
                v_part.mul_(decay_).add_(g_part, alpha=keep_)
                if offset is not None:
                    v_part.add_(m_part, alpha=stiffness_).sub_(offset[part])
                elif target is not None:
                    gap = target[part]
                    v_part.add_(torch.sub(m_part, gap, out=gap), alpha=stiffness_)
            elif offset is not None:
                v_part.mul_(decay[part]).addcmul_(g_part, keep[part]).addcmul_(m_part, stiffness[part]).sub_(offset[part])
            elif target is not None:
                gap = target[part]
                torch.sub(m_part, gap, out=gap)
                v_part.mul_(decay[part]).addcmul_(g_part, keep[part]).addcmul_(gap, stiffness[part])
            m_part.add_(v_part, alpha=-self.lr)
        if not isinstance(active, slice):
            self.value[active], self.velocity[active] = m, v


def _rows(values: Tensor, active: slice | Tensor) -> Tensor:
    """The active clients' rows of values that each client has its own of [C, k], or all share [1, k]."""
    return values if len(values) == 1 else values[active]


def train(
    network: Network,
    likelihood: Likelihood,
    start: Weights,
    clients: Clients,
    plan: Plan,
    rng: Randomness,
    *,
    pull: Pull | None = None,
    head_pull: Pull | None = None,
    p_do: float = 1.0,
    example_weights: Tensor | None = None,
    beside: Callable[[Batch, Tensor], None] | None = None,
) -> tuple[Weights, dict[str, Tensor]]:
    """Train C clients from `start` by `plan`; `beside(batch, m)` is called with every batch and the clients' current m.

    `example_weights` multiplies the loss of each example that the clients hold, in the order of `clients.train.rows`.

    Returns:
        The weights found, and the clients' reports.
    """
    solver = Sgd(network, start, plan, pull=pull, head_pull=head_pull, p_do=p_do)
    for batch in batches(clients, plan, rng, merge_single=network.has_batch_norm):
        solver.step(batch, likelihood, example_weights=None if example_weights is None else example_weights[batch.held])
        if beside is not None:
            beside(batch, solver.weights.theta[batch.active])
    return solver.weights, solver.report() | {"examples": clients.sizes.double()}
