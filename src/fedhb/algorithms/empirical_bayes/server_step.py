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

A prior N(0, Sigma / lambda0) on mu makes it N / (N + lambda0) of the clients' mean. With that in every round m0 loses as much
whether clients have gone all the way or hardly begun, and in the end loses while they stand still. Were mu at that place at
every moment, their pulls would add up to c times their mean, c_l = lambda0 / (N + lambda0) / u_l: weight decay while they train.

    m0 <- e^{-t c_l} m0 + omega_l g_t,     omega_l = D(lambda_l + c_l) / D(lambda_l + 1/u_l)

The decay is that of directions without curvature, in which m0 has most of its length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.empirical_bayes.variances import spread, steepness

SHORTEST, LONGEST = 1.0, 2.0
LAST, FACTOR = "last_step", "omega"
"""What the server keeps: g_{t-1} [d + h] and omega_{t-1} [1]."""


def begin(vectors: list[Tensor]) -> Arrays:
    """Before the first round."""
    return {LAST: torch.zeros_like(torch.cat(vectors)), FACTOR: torch.ones_like(vectors[0][:1])}


def relaxed(
    server: Arrays, new: Arrays, keys: list[str], way: tuple[Tensor, Tensor] | None = None
) -> Arrays:
    """The new vectors under these keys moved on along their step, and what is kept for the next one; on this `way` (`lengths`)
    each weight goes omega_l times as far at least, and loses its share of what it was."""
    steps = {key: new[key] - server[key] for key in keys}
    g = torch.cat(list(steps.values()))
    omega = factor(g, server[LAST], server[FACTOR].item())
    kept = {LAST: g, FACTOR: torch.full_like(server[FACTOR], omega)}
    if way is None:
        return (
            {key: server[key] + omega * step for key, step in steps.items()} | kept
            if omega != 1.0
            else kept
        )
    moved, sizes = way[0].clamp_min(omega).to(g) * g, [len(step) for step in steps.values()]
    moved -= way[1].to(g) * torch.cat([server[key] for key in keys])
    return {
        key: server[key] + own for key, own in zip(keys, moved.split(sizes), strict=True)
    } | kept


def factor(g: Tensor, before: Tensor, omega: float) -> float:
    """omega_t from g_t, g_{t-1} [k] and omega_{t-1}; 1 where there was no step before."""
    length = float(before.double().square().sum())
    if length == 0.0:
        return SHORTEST
    r = float(torch.dot(g.double(), before.double())) / length
    return min(LONGEST, max(SHORTEST, omega / (1.0 - r))) if r < 1.0 else LONGEST


def lengths(
    server: Arrays, summary: Arrays, counts: Sequence[int], precision: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """omega_l and 1 - e^{-t c_l} with this precision 1/u [L] and c = share / u in the body, for each weight [d + h]."""
    body = torch.tensor(counts, device=precision.device).cumsum(0) <= len(
        server["m0"]
    )  # mu is the body's alone
    time = max(0.0, float(summary["curvature"][1] / summary["count"]))  # a client may say anything
    decay = share * precision * body
    omega = along(steepness(server["evidence"], counts), precision, time, decay)
    return spread(omega, counts), spread(-torch.expm1(-time * decay), counts)


def along(curvature: Tensor, precision: Tensor, time: float, decay: Tensor | float = 0.0) -> Tensor:
    """omega_l [L] of clients that trained for this time, by their losses' curvature and the prior's precision [L]."""
    if time <= 0.0:
        return torch.ones_like(precision)
    return (_way(curvature + decay, time) / _way(curvature + precision, time)).clamp(
        SHORTEST, LONGEST
    )


def _way(x: Tensor, time: float) -> Tensor:
    """D(x) = (1 - e^{-t x}) / x, t where x is 0."""
    return torch.where(x > 0, -torch.expm1(-time * x) / x, torch.full_like(x, time))
