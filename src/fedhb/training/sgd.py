"""Local training of C clients at once: stochastic gradient descent with momentum and a penalty.

For each client and minibatch of B examples, with example weights w_b that are 1 by default:

    m~ <- m with the dropped columns set to zero (eq:spiky2)
    g  <- d/dm~ 1/B sum_b w_b loss(f(x_b; m~), y_b),  zero in the dropped columns
    v  <- momentum v + g
    m  <- m - lr v,  with the pull as a proximal step (proximal.py)

The head is trained by the same lines, without dropout. The velocity v starts at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedhb.clients.clients import Clients
from fedhb.likelihood import Likelihood, slope
from fedhb.network.gradients import Bound, LossSlope
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.batches import Batch, batches
from fedhb.training.plan import Plan
from fedhb.training.proximal import NO_PENALTY, Descent, Penalty
from fedhb.training.training_metrics import TrainingMetrics


class Sgd:
    """Stochastic gradient descent with momentum for the weights of C clients, updated in place.

    Args:
        network: what the weights belong to.
        weights: the starting point; it becomes the result.
        plan: learning rate, momentum, and whether the head is trained.
        penalty: the pulls on theta and head, and the dropout of columns.
    """

    def __init__(
        self, network: Network, weights: Weights, plan: Plan, penalty: Penalty = NO_PENALTY
    ):
        self.network, self.weights, self.plan, self.p_do = network, weights, plan, penalty.p_do
        self.train_head = plan.train_head and weights.head.shape[1] > 0
        self._parts = [Descent(weights.theta, plan, penalty.pull)]
        if self.train_head:
            self._parts.append(Descent(weights.head, plan, penalty.head_pull))
        self._drops: dict[torch.Generator, Iterator[list[int]]] = {}
        self._bound: dict[int, tuple[Bound, list[Tensor]]] = {}
        self._gradients: list[Tensor] = []
        self._shares: dict[tuple[int, ...], Tensor] = {}
        self._metrics = TrainingMetrics(len(weights.theta), weights.theta.device)

    def step(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None = None,
        example_weights: Tensor | None = None,
    ) -> None:
        """Take one step of every active client on its batch.

        Args:
            batch: inputs, targets, and which clients are active.
            likelihood: gives the loss of each example.
            y: targets to use instead of the batch's.
            example_weights: multiplies the loss of each example [A, B].
        """
        active = batch.active
        for part in self._parts:
            part.aim(active)
        bound, places = self._bind(active)
        # the gradient goes into the velocity, or without momentum into the weights themselves
        keep, scale = (self.plan.momentum, 1.0) if self.plan.momentum else (1.0, -self.plan.lr)
        loss_slope = self._loss_slope(batch, likelihood, y, example_weights)
        with self._thinned(batch, bound.weights.theta, places[0], keep):
            self._differentiate(batch, loss_slope, bound, keep, scale)
        for part, place in zip(self._parts, places, strict=True):
            part.step(active, place)
        if not isinstance(active, slice) and not self.plan.momentum:
            self.weights.theta[active] = bound.weights.theta
            self.weights.head[active] = bound.weights.head

    def gradients(
        self, batch: Batch, likelihood: Likelihood, training: bool = True, body: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the active clients' mean losses at their weights.

        Nothing moves but the buffers of batch norm. Without `body` the first is not written.

        Args:
            batch: inputs, targets, and which clients are active.
            likelihood: gives the loss of each example.
            training: whether modules are in training mode, or in that of evaluation.
            body: whether theta's gradient is wanted; without it nothing below the head is
                differentiated.

        Returns:
            For theta [A, d], and for the head [A, h] where it is trained. Both are written anew by
            the next call.
        """
        if not self._gradients:  # once: memory of this size is dear to allocate
            self._gradients = [torch.empty_like(part.value) for part in self._parts]
        theta, *heads = (gradient[: len(batch.counts)] for gradient in self._gradients)
        head = heads[0] if heads else None
        bound = self.network.bind(self._active(batch.active), theta if body else None, head)
        loss_slope = self._loss_slope(batch, likelihood)
        with self._thinned(batch, bound.weights.theta, theta, keep=0.0):
            self._differentiate(batch, loss_slope, bound, 0.0, 1.0, training)
        return theta, head

    def _active(self, active: slice | Tensor) -> Weights:
        """Return the weights of the active clients: views where `active` is a slice."""
        weights = self.weights
        return Weights(weights.theta[active], weights.head[active], weights.buffers[active])

    def _bind(self, active: slice | Tensor) -> tuple[Bound, list[Tensor]]:
        """Return the active clients' weights, and the places of a step's gradients."""
        if isinstance(active, slice) and active.stop in self._bound:
            return self._bound[active.stop]
        weights = self._active(active)
        if self.plan.momentum:
            places = [part.velocity[active] for part in self._parts]
        else:
            places = [weights.theta, weights.head][: len(self._parts)]
        bound = self.network.bind(weights, places[0], places[1] if self.train_head else None)
        if isinstance(active, slice):
            self._bound[active.stop] = bound, places
        return bound, places

    def _loss_slope(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None = None,
        example_weights: Tensor | None = None,
    ) -> LossSlope:
        """Return the derivative of the mean losses as a function of the outputs.

        It also records the loss and score of the last epoch.
        """
        targets = batch.y if y is None else y
        shares = self._shares_of(batch.counts)

        def loss_slope(outputs: Tensor, client: int | None) -> Tensor:
            rows = slice(None) if client is None else slice(client, client + 1)
            width = outputs.shape[1]
            target = targets[rows, :width]
            valid = None if client is not None else batch.valid
            if batch.last_epoch:
                clients = _select(batch.active, client)
                self._metrics.add(likelihood, clients, outputs, target, valid)
            result = slope(likelihood, outputs, target) * shares[rows]
            if valid is not None:
                result.mul_(valid.to(result.dtype).unsqueeze(-1))
            if example_weights is not None:
                factor = example_weights[rows, :width]
                result.mul_(factor.to(result.dtype).unsqueeze(-1))
            return result

        return loss_slope

    def _differentiate(
        self,
        batch: Batch,
        loss_slope: LossSlope,
        bound: Bound,
        keep: float,
        scale: float,
        training: bool = True,
    ) -> None:
        """Do place <- keep place + scale gradient for the active clients."""
        generators = () if self.network.batches_clients else batch.generators
        # a module that does not know the client axis may draw random numbers of its own
        seeds = [int(torch.randint(2**31, (), generator=g)) for g in generators]
        bound.differentiate(
            batch.inputs(self.network),
            loss_slope,
            counts=batch.counts,
            seeds=seeds,
            keep=keep,
            scale=scale,
            training=training,
        )
        if not isinstance(batch.active, slice):
            self.weights.buffers[batch.active] = bound.weights.buffers

    @contextmanager
    def _thinned(self, batch: Batch, theta: Tensor, place: Tensor, keep: float) -> Iterator[None]:
        """Set dropped columns of theta to zero, and put them back with place <- keep place."""
        dropped = self._dropped(batch)
        columns = self.network.columns.of(theta, dropped) if dropped else []
        places = self.network.columns.of(place, dropped) if dropped else []
        weights = [column.clone() for column in columns]
        kept = [keep * column for column in places]
        for column in columns:
            column.zero_()
        yield
        for column, before in zip(places, kept, strict=True):
            column.copy_(before)
        for column, before in zip(columns, weights, strict=True):
            column.copy_(before)  # last: the places may be the weights themselves

    def _dropped(self, batch: Batch) -> list[tuple[int, int]]:
        """Return the columns that are dropped, each with its client's row among the active."""
        if self.p_do >= 1.0:
            return []
        pairs = []
        for k, generator in enumerate(batch.generators):
            if generator not in self._drops:
                self._drops[generator] = self.network.columns.drops(self.p_do, generator)
            pairs += [(k, column) for column in next(self._drops[generator])]
        return pairs

    def _shares_of(self, counts: Sequence[int]) -> Tensor:
        """Return 1/B of each client [A, 1, 1], made once for all batches with these counts."""
        key = tuple(counts)
        if key not in self._shares:
            shares = 1.0 / torch.tensor(counts, dtype=self.network.dtype)
            self._shares[key] = shares.to(self.weights.theta.device).view(-1, 1, 1)
        return self._shares[key]

    def report(self) -> dict[str, Tensor]:
        """Return the mean loss and score of each client over its last epoch [C]."""
        return self._metrics.report()


def _select(active: slice | Tensor, client: int | None) -> slice | Tensor:
    """Return the active clients, or one of them by its row."""
    if client is None:
        return active
    row = slice(client, client + 1)
    return active[row] if isinstance(active, Tensor) else row  # a slice is the first clients


def train(
    network: Network,
    likelihood: Likelihood,
    start: Weights,
    clients: Clients,
    plan: Plan,
    rng: Randomness,
    penalty: Penalty = NO_PENALTY,
    beside: Callable[[Batch, Tensor], None] | None = None,
) -> tuple[Weights, dict[str, Tensor]]:
    """Train C clients from `start` by `plan`.

    `beside(batch, m)` is called after every step with its batch and the active clients' m.

    Returns:
        The weights, and the clients' reports.
    """
    solver = Sgd(network, start, plan, penalty)
    for batch in batches(clients, plan, rng, merge_single=network.has_batch_norm):
        solver.step(batch, likelihood)
        if beside is not None:
            beside(batch, solver.weights.theta[batch.active])
    return solver.weights, solver.report() | {"examples": clients.sizes.double()}
