"""Averages of SGD iterates: FedPA's approximate posterior samples, and the stochastic weight averaging of FedBE's student.

The first `burn_in` of a client's training is passed over; the rest is cut into segments of equal length, and the iterates of each
are averaged. Length is measured in examples seen, so that clients of any size, with batches of any number, have their own bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan


class Iterates:
    """Collects what `train(..., beside=...)` passes by: called after every step of C clients.

    Args:
        weights: the weights that are trained, in place.
        with_head: whether an iterate is theta and head [d + h], or theta alone [d].
        examples: how many examples each client will see in its training, all epochs together.
        burn_in: share of the training before the first segment.
        segments: their number.
    """

    def __init__(
        self,
        weights: Weights,
        with_head: bool,
        examples: Sequence[int],
        burn_in: float,
        segments: int,
    ):
        self.parts = [weights.theta, weights.head] if with_head else [weights.theta]
        self.examples, self.burn_in, self.segments = list(examples), burn_in, segments
        self.seen = [0] * len(self.examples)
        self.sums = [[torch.zeros_like(part) for part in self.parts] for _ in range(segments)]
        self.counts = [[0] * segments for _ in self.examples]

    @classmethod
    def last(cls, weights: Weights, clients: Clients, plan: Plan, share: float) -> Iterates:
        """The last share of a training by this plan, as one segment."""
        return cls(weights, plan.train_head, (plan.epochs * clients.sizes).tolist(), 1.0 - share, 1)

    def __call__(self, batch: Batch, m: Tensor) -> None:
        """Add the current iterates of the clients that took this step."""
        clients = torch.arange(len(self.seen))[batch.active].tolist()
        for c, count in zip(clients, batch.counts, strict=True):
            self.seen[c] += count
            s = self._segment(c)
            if s >= 0:
                self.counts[c][s] += 1
                for total, part in zip(self.sums[s], self.parts, strict=True):
                    total[c] += part[c]

    def _segment(self, c: int) -> int:
        """The segment that the client is in, -1 in its burn-in; its last iterate is always in the last segment."""
        if self.seen[c] == self.examples[c]:
            return self.segments - 1
        share = self.seen[c] / self.examples[c] - self.burn_in
        # a bound belongs to the segment before it, whichever way the division rounds
        return (
            math.ceil(share / (1.0 - self.burn_in) * self.segments - 1e-9) - 1 if share > 0 else -1
        )

    def averages(self, c: int) -> list[Tensor]:
        """The averages [d] or [d + h] of a client's segments; one too short to hold a step has none."""
        found = []
        for sums, count in zip(self.sums, self.counts[c], strict=True):
            if count:
                found.append(torch.cat([part[c] for part in sums]) / count)
        return found

    def settle(self) -> None:
        """Make the weights what was averaged last."""
        for c in range(len(self.examples)):
            for part, mean in zip(
                self.parts,
                self.averages(c)[-1].split([part.shape[1] for part in self.parts]),
                strict=True,
            ):
                part[c] = mean
