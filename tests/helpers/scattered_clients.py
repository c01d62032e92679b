"""Clients in three overlapping groups, and their responsibilities by hand."""

from __future__ import annotations

import torch
from problems import (
    normal,
    vector_problem,
)
from torch import Tensor

from fedhb.algorithms import Problem

N, D, K = 9, 4, 3


SIGMA2 = 0.3


def server_problem() -> Problem:
    return vector_problem(D, num_clients=N, num_examples=50)


def scattered(count: int = N) -> Tensor:
    """m_i in three overlapping groups: responsibilities far from zero and one."""
    return normal(K, D, seed=1)[torch.arange(count) % K] + 0.5 * normal(count, D, seed=2)


def server_of(r: Tensor) -> dict[str, Tensor]:
    return {"r": r, "idle": torch.zeros(len(r), dtype=torch.int64)}


def c_by_hand(m: Tensor, r: Tensor, sigma2: float = SIGMA2) -> Tensor:
    """c(j|i) as printed: exponentials, nothing shifted; for distances near one only."""
    k = (-(m.unsqueeze(1) - r).square().sum(-1) / (2 * sigma2)).exp()
    return k / k.sum(1, keepdim=True)
