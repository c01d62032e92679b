"""Describes the posterior and the clients in plain numbers, for a report.

`spread` is the root mean square deviation of the clients' weights from their mean, by tensor, for
every algorithm. The rest is the algorithm's own description (`describe`, `describe_personal`,
`describe_examples` of algorithms/contract.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.clients.clients import Share
from fedhb.network.vectors import tensor_means, tensor_sizes

EXAMPLES = 4096
"""Test examples that an algorithm describes, at most about so many in all."""


class PosteriorDescription:
    """Collects the clients' personal weights chunk by chunk, in O(d) memory."""

    def __init__(self, problem: Problem, algorithm: Algorithm, server: Arrays, count: int):
        self.problem, self.algorithm, self.server, self.count = problem, algorithm, server, count
        # differences to where the network began: their squares do not cancel
        self._origin = problem.network.theta
        self._sum = torch.zeros_like(self._origin, dtype=torch.float64)
        self._squares = torch.zeros_like(self._sum)
        self._personal: dict[str, dict[int, list[Any]]] = {}

    def see(self, positions: Sequence[int], theta: Tensor) -> None:
        """Add the weights [C, d] of the clients at these positions."""
        for row in theta:
            gap = (row - self._origin).double()
            self._sum += gap
            self._squares.addcmul_(gap, gap)
        described = self.algorithm.describe_personal(self.problem, self.server, theta)
        for key, values in described.items():
            rows = zip(positions, values.tolist(), strict=True)
            self._personal.setdefault(key, {}).update(rows)

    def summary(self, share: Share) -> dict[str, Any]:
        """Return what evaluation.json holds of the posterior; `share` are the test examples."""
        sizes = tensor_sizes(self.problem.network, with_head=False)
        mean = self._sum / self.count
        variance = (self._squares / self.count - mean.square()).clamp_min_(0.0)
        most = max(2, EXAMPLES // self.count)
        return {
            "spread": tensor_means(variance, sizes).sqrt().tolist(),
            **self.algorithm.describe(self.problem, self.server),
            **{
                key: [values[k] for k in range(self.count)]
                for key, values in self._personal.items()
            },
            **self.algorithm.describe_examples(self.problem, self.server, share, most),
        }
