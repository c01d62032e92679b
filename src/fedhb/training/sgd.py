"""Local training of C clients at once: stochastic gradient steps on minibatches, with the prior's pull as a proximal step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedhb.clients.clients import Clients
from fedhb.likelihood import Likelihood, slope
from fedhb.network.vectors import Bound, Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.batches import Batch, batches
from fedhb.training.plan import Plan
from fedhb.training.proximal import Descent, Pull
from fedhb.training.training_metrics import Watch


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
        self._parts = [Descent(weights.theta, plan, pull)]
        if self.train_head:
            self._parts.append(Descent(weights.head, plan, head_pull))
        self._drops: dict[torch.Generator, Iterator[list[int]]] = {}
        self._bound: dict[int, tuple[Bound, list[Tensor]]] = {}
        self._gradient: list[Tensor] = []
        self._counts: dict[tuple[int, ...], Tensor] = {}
        self._watch = Watch(len(weights.theta), weights.theta.device)

    def step(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None = None,
        example_weights: Tensor | None = None,
    ) -> None:
        """One step of every active client on its batch; the arguments are those of `gradients`."""
        active = batch.active
        for part in self._parts:
            part.aim(active)
        bound, into = self._bind(active)
        keep, scale = (self.plan.momentum, 1.0) if self.plan.momentum else (1.0, -self.plan.lr)
        self._differentiate(batch, likelihood, y, example_weights, bound, into, keep, scale)
        for part, gradient in zip(self._parts, into, strict=True):
            part.step(active, gradient)
        if not isinstance(active, slice) and not self.plan.momentum:
            self.weights.theta[active], self.weights.head[active] = (
                bound.weights.theta,
                bound.weights.head,
            )

    def gradients(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None = None,
        example_weights: Tensor | None = None,
        training: bool = True,
        body: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of the active clients' mean losses at their weights; nothing moves but the buffers of batch norm.

        Args:
            batch: inputs, targets, and who is active.
            likelihood: gives the loss of each example.
            y: targets to use instead of the batch's.
            example_weights: multiplies the loss of each example [A, B].
            training: whether modules are in training mode, or in that of evaluation.
            body: whether theta's gradient is wanted; without it nothing below the head is differentiated.

        Returns:
            For theta [A, d], and for the head [A, h] where it is trained; both are written anew by the next call. Without
            `body` the first is not written.
        """
        if not self._gradient:  # once: memory of this size is dear to allocate
            self._gradient = [torch.empty_like(part.value) for part in self._parts]
        found = [gradient[: len(batch.counts)] for gradient in self._gradient]
        places = found[0] if body else None, found[1] if self.train_head else None
        bound = self.network.bind(self._active(batch.active), *places)
        self._differentiate(batch, likelihood, y, example_weights, bound, found, 0.0, 1.0, training)
        return found[0], found[1] if self.train_head else None

    def _active(self, active: slice | Tensor) -> Weights:
        """The weights of the active clients: views where `active` is a slice."""
        return Weights(
            self.weights.theta[active], self.weights.head[active], self.weights.buffers[active]
        )

    def _bind(self, active: slice | Tensor) -> tuple[Bound, list[Tensor]]:
        """The active clients' weights, and where their gradients go: to the velocities, or without momentum to the weights."""
        if isinstance(active, slice) and active.stop in self._bound:
            return self._bound[active.stop]
        weights = self._active(active)
        if self.plan.momentum:
            into = [part.velocity[active] for part in self._parts]
        else:
            into = [weights.theta, weights.head][: len(self._parts)]
        found = self.network.bind(weights, into[0], into[1] if self.train_head else None), into
        if isinstance(active, slice):
            self._bound[active.stop] = found
        return found

    def _differentiate(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None,
        example_weights: Tensor | None,
        bound: Bound,
        into: Sequence[Tensor],
        keep: float,
        scale: float,
        training: bool = True,
    ) -> None:
        """into <- keep into + scale gradient, for theta [A, d] and, where it is trained, for the head [A, h]."""
        y = batch.y if y is None else y
        active, theta = batch.active, bound.weights.theta
        shares = self._shares(batch.counts)

        def descend(outputs: Tensor, client: int | None) -> Tensor:
            rows = slice(None) if client is None else slice(client, client + 1)
            width = outputs.shape[1]
            target = y[rows, :width]
            valid = None if client is not None else batch.valid
            if batch.last_epoch:
                who = (
                    active
                    if client is None
                    else active[rows]
                    if isinstance(active, Tensor)
                    else rows
                )
                self._watch.see(likelihood, who, outputs, target, valid)
            found = slope(likelihood, outputs, target) * shares[rows]
            for factor in (
                valid,
                None if example_weights is None else example_weights[rows, :width],
            ):
                found = (
                    found if factor is None else found.mul_(factor.to(found.dtype).unsqueeze(-1))
                )
            return found

        # the thinned m: dropped columns are zero for this step, and have no gradient
        dropped = self._dropped(batch)
        columns, sunk = (self.network.columns.of(vectors, dropped) for vectors in (theta, into[0]))
        kept = [(column.clone(), keep * place) for column, place in zip(columns, sunk, strict=True)]
        for column in columns:
            column.zero_()
        # a module that does not know the client axis may draw random numbers of its own
        seeds = (
            []
            if self.network.batches_clients
            else [int(torch.randint(2**31, (), generator=g)) for g in batch.generators]
        )
        x, how = batch.inputs(self.network), {"keep": keep, "scale": scale}
        bound.differentiate(x, descend, counts=batch.counts, seeds=seeds, training=training, **how)
        for column, place, (weight, before) in zip(columns, sunk, kept, strict=True):
            place.copy_(before)
            column.copy_(weight)  # last: the places may be the weights themselves
        if not isinstance(active, slice):
            self.weights.buffers[active] = bound.weights.buffers

    def _dropped(self, batch: Batch) -> list[tuple[int, int]]:
        """The columns that this batch's dropout removes, each with its client's row among the active."""
        if self.p_do >= 1.0:
            return []
        pairs = []
        for k, generator in enumerate(batch.generators):
            if generator not in self._drops:
                self._drops[generator] = self.network.columns.drops(self.p_do, generator)
            pairs += [(k, column) for column in next(self._drops[generator])]
        return pairs

    def _shares(self, counts: Sequence[int]) -> Tensor:
        """What an example counts in its client's mean [A, 1, 1], on the device once for all batches that have these counts."""
        key = tuple(counts)
        if key not in self._counts:
            shares = 1.0 / torch.tensor(counts, dtype=self.network.dtype)
            self._counts[key] = shares.to(self.weights.theta.device).view(-1, 1, 1)
        return self._counts[key]

    def report(self) -> dict[str, Tensor]:
        """Mean loss and score of each client over its last epoch [C]."""
        return self._watch.report()


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
        solver.step(
            batch,
            likelihood,
            example_weights=None if example_weights is None else example_weights[batch.held],
        )
        if beside is not None:
            beside(batch, solver.weights.theta[batch.active])
    return solver.weights, solver.report() | {"examples": clients.sizes.double()}
