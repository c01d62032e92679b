"""Averages of SGD iterates: FedPA's posterior samples, and stochastic weight averaging.

The first `burn_in` of a client's training is passed over. The rest is cut into segments of equal
length, and the iterates of each are averaged. Length is measured in examples seen, so that clients
of any size, with any number of batches, have their own bounds.
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
    """The averages of the iterates of C clients: `train(..., beside=...)` calls it at every step.

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
        """Return the last share of a training by this plan, as one segment."""
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
        """Return the segment that the client is in, -1 in its burn-in.

        Its last iterate is always in the last segment.
        """
        if self.seen[c] == self.examples[c]:
            return self.segments - 1
        share = self.seen[c] / self.examples[c] - self.burn_in
        if share <= 0:
            return -1
        # a bound belongs to the segment before it, whichever way the division rounds
        return math.ceil(share / (1.0 - self.burn_in) * self.segments - 1e-9) - 1

    def averages(self, c: int) -> list[Tensor]:
        """Return the averages [d] or [d + h] of a client's segments.

        A segment that is too short to hold a step has none.
        """
        return [
            torch.cat([part[c] for part in sums]) / count
            for sums, count in zip(self.sums, self.counts[c], strict=True)
            if count
        ]

    def settle(self) -> None:
        """Set the weights to the last averages."""
        widths = [part.shape[1] for part in self.parts]
        for c in range(len(self.examples)):
            means = self.averages(c)[-1].split(widths)
            for part, mean in zip(self.parts, means, strict=True):
                part[c] = mean
