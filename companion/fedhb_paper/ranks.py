"""Comparison of methods over several settings: mean ranks, Friedman's test, Nemenyi's difference.

Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006. With n blocks
(a setting with a seed), k methods and mean ranks R_j, and k - 1 degrees of freedom:

    chi2 = 12 n / (k (k+1)) (sum_j R_j^2 - k (k+1)^2 / 4)
           / (1 - sum over ties of (t^3 - t) / (n (k^3 - k)))
    two methods differ at 5 % where their mean ranks differ by more than
    CD = q sqrt(k (k+1) / (6 n))

Seeds of one setting share its data, so blocks are not quite independent, and the p-values are
somewhat too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Q = (
    1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164, 3.219,
    3.268, 3.313, 3.354, 3.391, 3.426, 3.458, 3.489, 3.517, 3.544,
)  # fmt: skip
"""The studentised range at 5 % over sqrt(2), for k = 2 to 20 methods."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        ranks: the mean ranks; 1 is best.
        chi2, p: Friedman's statistic and its p-value.
        critical: the critical difference; None beyond 20 methods.
        blocks: their number, n.
    """

    ranks: list[float]
    chi2: float
    p: float
    critical: float | None
    blocks: int


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, the largest first; equal ones share their mean rank."""
    return [
        1
        + sum(other > value for other in values)
        + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def compare(blocks: Sequence[Sequence[float]]) -> Comparison:
    """Compare methods by their scores in every block [n][k]; higher is better."""
    n, k = len(blocks), len(blocks[0])
    each = [ranks(block) for block in blocks]
    mean = [sum(column) / n for column in zip(*each, strict=True)]
    ties = sum(
        block.count(v) ** 3 - block.count(v) for block in map(list, blocks) for v in set(block)
    )
    correction = 1 - ties / (n * (k**3 - k))
    spread = sum(r * r for r in mean) - k * (k + 1) ** 2 / 4
    chi2 = 12 * n / (k * (k + 1)) * spread / correction if correction > 0 else 0.0
    p = torch.special.gammaincc(
        torch.tensor((k - 1) / 2, dtype=torch.float64),
        torch.tensor(max(chi2, 0.0) / 2, dtype=torch.float64),
    )
    critical = Q[k - 2] * math.sqrt(k * (k + 1) / (6 * n)) if k - 2 < len(Q) else None
    return Comparison(mean, chi2, float(p), critical, n)
