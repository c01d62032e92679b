"""Local training of C clients at once: stochastic gradient steps on minibatches, with the prior's pull as a proximal step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedhb.algorithms.base import Plan
from fedhb.algorithms.batches import Batch, batches
from fedhb.algorithms.proximal import Momentum, Pull
from fedhb.clients import Clients
from fedhb.likelihood import Likelihood
from fedhb.network import Network, Weights
from fedhb.seeding import Randomness


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
        self._theta = Momentum(weights.theta, plan, pull)
        self._head = Momentum(weights.head, plan, head_pull) if self.train_head else None
        self._drops: dict[torch.Generator, Iterator[Tensor]] = {}
        self._gradient: tuple[Tensor, Tensor | None] | None = None
        count = len(weights.theta)
        self._totals = torch.zeros(3, count, dtype=torch.float64, device=weights.theta.device)  # loss, score, examples

    def step(self, batch: Batch, likelihood: Likelihood, y: Tensor | None = None, example_weights: Tensor | None = None) -> None:
        """One step of every active client on its batch; the arguments are those of `gradients`."""
        solvers = [self._theta] if self._head is None else [self._theta, self._head]
        velocities = [solver.velocity[batch.active] for solver in solvers]  # views where `active` is a slice
        self._differentiate(batch, likelihood, y, example_weights, velocities, self.plan.momentum)
        for solver, v in zip(solvers, velocities, strict=True):
            solver.step(batch.active, v)

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
        if self._gradient is None:  # once: memory of this size is dear to allocate
            self._gradient = (
                torch.empty_like(self.weights.theta),
                torch.empty_like(self.weights.head) if self.train_head else None,
            )
        found = [part[: len(batch.counts)] for part in self._gradient if part is not None]
        self._differentiate(batch, likelihood, y, example_weights, found, 0.0)
        return found[0], found[1] if self.train_head else None

    def _differentiate(
        self,
        batch: Batch,
        likelihood: Likelihood,
        y: Tensor | None,
        example_weights: Tensor | None,
        into: Sequence[Tensor],
        keep: float,
    ) -> None:
        """into <- keep into + gradient, for theta [A, d] and, where it is trained, for the head [A, h]."""
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
            valid = None if batch.valid is None or client is not None else batch.valid
            if valid is not None:
                each = each * valid.to(each.dtype)
            sums = each.sum(1)
            if batch.last_epoch:
                score = likelihood.score(outputs.detach(), target)
                hits = (score if valid is None else score * valid.to(score.dtype)).sum(1)
                self._note(active, rows, torch.stack([sums.detach(), hits.to(sums.dtype), counts[rows]]))
            if example_weights is not None:
                sums = (each * example_weights[rows, :width]).sum(1)
            return (sums / counts[rows]).sum()

        dropped = None if self.p_do >= 1.0 else self._dropped(batch)
        if dropped is not None:
            flat, sunk = theta.view(-1), into[0].view(-1)
            weight_kept, sunk_kept = flat[dropped], keep * sunk[dropped] if keep else 0.0
            flat[dropped] = 0.0
        # a module that does not know the client axis may draw random numbers of its own
        seeds = [] if self.network.batches_clients else [int(torch.randint(2**31, (), generator=g)) for g in batch.generators]
        head = into[1] if len(into) > 1 else None
        self.network.value_and_grad(
            part, batch.inputs(self.network), loss, into[0], head, counts=batch.counts, seeds=seeds, keep=keep
        )
        if dropped is not None:
            flat[dropped], sunk[dropped] = weight_kept, sunk_kept  # a dropped weight has no gradient
        if not isinstance(active, slice):
            self.weights.buffers[active] = part.buffers

    def _dropped(self, batch: Batch) -> Tensor:
        """Coordinates into the flattened [A, d] that this batch's dropout masks set to zero: the thinned m."""
        parts = []
        for k, generator in enumerate(batch.generators):
            if generator not in self._drops:
                self._drops[generator] = self.network.columns.drops(self.p_do, generator)
            parts.append(next(self._drops[generator]) + k * self.network.num_params)
        return torch.cat(parts)

    def _note(self, active: slice | Tensor, rows: slice, sums: Tensor) -> None:
        """Add the loss, score and examples [3, rows] of these rows of the active clients."""
        if isinstance(active, slice):
            self._totals[:, active][:, rows].add_(sums)
        else:
            self._totals[:, active[rows]] += sums

    def report(self) -> dict[str, Tensor]:
        """Mean loss and score of each client over its last epoch [C]."""
        loss, score, examples = self._totals
        return {"loss": loss / examples, "score": score / examples}


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
