"""Over-relaxation: the server's step is lengthened while successive steps agree, and where the prior has shortened it.

    g_t = mean_i m_i - m0                              the step of block-coordinate descent
    m0 <- m0 + omega_t g_t,     omega_t = omega_{t-1} / (1 - r_t) within [1, 2],     r_t = <g_t, g_{t-1}> / |g_{t-1}|^2

Such steps are slow where the prior is stiff against the data: with curvature lambda and prior precision 1/u a round goes
lambda / (lambda + 1/u) of the way. Near an optimum g_t = (I - omega A) g_{t-1}, where A has these shares for eigenvalues, so
r_t = 1 - omega a with a the mean of them that g_{t-1} sees, and omega_t = 1/a: Barzilai and Borwein's step. As no share is above
1 for clients that reach their optimum, every omega in (0, 2) converges ("Adaptive overrelaxed bound optimization methods",
Salakhutdinov and Roweis, 2003). What a cohort's mean is off by is gone in the next round, which makes r_t smaller, so a noisy
step is not lengthened.

The prior's mean stays at m0 while clients train. Were m0 the mean of their m_i at every moment, the prior would damp what clients
differ by and leave alone what they have in common. From a gradient G a client goes D(lambda + 1/u) G in a direction with
curvature lambda, D(x) = (1 - e^{-t x}) / x after the time t: the sum of its learning rates over |D_i|, momentum included. With a
mean that goes along it were D(lambda) G for all of them together. So layer by layer the step is at least

    omega_l = D(lambda_l) / D(lambda_l + 1/u_l),     lambda_l = tr(H_l) / k_l, the curvature in k_l directions (evidence.py)

times as long, and at most 2: 1 in a layer whose data have the last word, 1 + 1/(u lambda) where training converges, and where
it ends early in a flat layer, as much as the prior has taken from it there. Before the first measurement lambda counts as 0.
omega_t is that of steps omega_{t-1} times as long in every layer: where layers went further it comes out shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays
from fedhb.algorithms.evidence import spread, steepness

SHORTEST, LONGEST = 1.0, 2.0
LAST, FACTOR = "last_step", "omega"
"""What the server keeps: g_{t-1} [d + h] and omega_{t-1} [1]."""


def begin(vectors: list[Tensor]) -> Arrays:
    """Before the first round."""
    return {LAST: torch.zeros_like(torch.cat(vectors)), FACTOR: torch.ones_like(vectors[0][:1])}


def relaxed(server: Arrays, new: Arrays, keys: list[str], least: Tensor | None = None) -> Arrays:
    """The new vectors under these keys moved on along their step, each weight `least` [d + h] times as far at least, and what is
    kept for the next one."""
    steps = {key: new[key] - server[key] for key in keys}
    g = torch.cat(list(steps.values()))
    omega = factor(g, server[LAST], server[FACTOR].item())
    kept = {LAST: g, FACTOR: torch.full_like(server[FACTOR], omega)}
    if least is None:
        return {key: server[key] + omega * step for key, step in steps.items()} | kept if omega != 1.0 else kept
    factors = least.clamp_min(omega).to(g).split([len(step) for step in steps.values()])
    return {key: server[key] + own * step for (key, step), own in zip(steps.items(), factors, strict=True)} | kept


def factor(g: Tensor, before: Tensor, omega: float) -> float:
    """omega_t from g_t, g_{t-1} [k] and omega_{t-1}; 1 where there was no step before."""
    length = float(before.double().square().sum())
    if length == 0.0:
        return SHORTEST
    r = float(torch.dot(g.double(), before.double())) / length
    return min(LONGEST, max(SHORTEST, omega / (1.0 - r))) if r < 1.0 else LONGEST


def lengths(server: Arrays, summary: Arrays, counts: Sequence[int], precision: Tensor) -> Tensor:
    """omega_l of the layers [L] with this precision of the prior, for each of their weights [d + h]."""
    time = float(summary["curvature"][1] / summary["count"])
    return spread(along(steepness(server["evidence"], counts), precision, time), counts)


def along(curvature: Tensor, precision: Tensor, time: float) -> Tensor:
    """omega_l [L] of clients that trained for this time, by their losses' curvature and the prior's precision [L]."""
    if time <= 0.0:
        return torch.ones_like(precision)
    return (_way(curvature, time) / _way(curvature + precision, time)).clamp(SHORTEST, LONGEST)


def _way(x: Tensor, time: float) -> Tensor:
    """D(x) = (1 - e^{-t x}) / x, t where x is 0."""
    return torch.where(x > 0, -torch.expm1(-time * x) / x, torch.full_like(x, time))
