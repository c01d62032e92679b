"""K prototypes r [K, d]: how near clients are to each, and sums over clients by prototype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedhb.algorithms.toolbox import differences


class Nearness:
    """How near clients at m [A, d] are to the prototypes. What is asked again at the same m is not computed again.

    One product with the K - 1 offsets from the first prototype, which are small: nothing cancels, and m is read once.
    """

    def __init__(self, r: Tensor, sigma2: float):
        self.sigma2, self.offsets = sigma2, r[1:] - r[0]
        self.bias = 0.5 * (self.offsets * (r[1:] + r[0])).sum(1)
        self._last: tuple[Tensor, int, Tensor] | None = None

    def scores(self, m: Tensor) -> Tensor:
        """-||m - r_j||^2 / 2 [A, K], less that of the first prototype."""
        if self._last is not None:
            at, version, scores = self._last  # `at` keeps its memory from being used for another m
            if (m.data_ptr(), m.shape, m._version) == (at.data_ptr(), at.shape, version):
                return scores
        # a matrix product with a single column is slow, a matrix-vector product is not
        products = (
            torch.mv(m, self.offsets[0]).unsqueeze(1)
            if len(self.offsets) == 1
            else m @ self.offsets.T
        )
        scores = functional.pad(products - self.bias, (1, 0))
        self._last = m, m._version, scores
        return scores

    def responsibilities(self, m: Tensor) -> Tensor:
        """c(j|m) = softmax_j(-||m - r_j||^2 / (2 sigma2)), [A, K]."""
        return (self.scores(m) / self.sigma2).softmax(1)


def by_prototype(found: Tensor, reference: Tensor, c: Tensor) -> Tensor:
    """sum_i c(j|i) (found_i - reference_j) for found [C, k], reference [K, k], c [C, K] -> [K, k]."""
    return torch.stack(
        [differences(found, own, weight) for own, weight in zip(reference, c.T, strict=True)]
    )
