"""Over-relaxation: the server's step is lengthened while successive steps agree.

    g_t = mean_i m_i - m0                              the step of block-coordinate descent
    m0 <- m0 + omega_t g_t,     omega_t = omega_{t-1} / (1 - r_t) within [1, 2],     r_t = <g_t, g_{t-1}> / |g_{t-1}|^2

Such steps are slow where the prior is stiff against the data: with curvature lambda and prior precision 1/u a round goes
lambda / (lambda + 1/u) of the way. Near an optimum g_t = (I - omega A) g_{t-1}, where A has these shares for eigenvalues, so
r_t = 1 - omega a with a the mean of them that g_{t-1} sees, and omega_t = 1/a: Barzilai and Borwein's step. As no share is above
1, every omega in (0, 2) converges ("Adaptive overrelaxed bound optimization methods", Salakhutdinov and Roweis, 2003). What
a cohort's mean is off by is gone in the next round, which makes r_t smaller, so a noisy step is not lengthened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays

SHORTEST, LONGEST = 1.0, 2.0
LAST, FACTOR = "last_step", "omega"
"""What the server keeps: g_{t-1} [d + h] and omega_{t-1} [1]."""


def begin(vectors: list[Tensor]) -> Arrays:
    """Before the first round."""
    return {LAST: torch.zeros_like(torch.cat(vectors)), FACTOR: torch.ones_like(vectors[0][:1])}


def relaxed(server: Arrays, new: Arrays, keys: list[str]) -> Arrays:
    """The new vectors under these keys moved on along their step, and what is kept for the next one."""
    steps = {key: new[key] - server[key] for key in keys}
    g = torch.cat(list(steps.values()))
    omega = factor(g, server[LAST], server[FACTOR].item())
    moved = {key: server[key] + omega * step for key, step in steps.items()} if omega != 1.0 else {}
    return moved | {LAST: g, FACTOR: torch.full_like(server[FACTOR], omega)}


def factor(g: Tensor, before: Tensor, omega: float) -> float:
    """omega_t from g_t, g_{t-1} [k] and omega_{t-1}; 1 where there was no step before."""
    length = float(before.double().square().sum())
    if length == 0.0:
        return SHORTEST
    r = float(torch.dot(g.double(), before.double())) / length
    return min(LONGEST, max(SHORTEST, omega / (1.0 - r))) if r < 1.0 else LONGEST
