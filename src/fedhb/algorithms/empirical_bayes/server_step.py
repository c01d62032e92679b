"""The server's step: longer while successive steps agree, and where the prior has shortened it.

    g_t = mean_i m_i - m0                                the step of block-coordinate descent
    m0 <- m0 + omega_t g_t,    omega_t = omega_{t-1} / (1 - r_t) within [1, 2],
                               r_t = <g_t, g_{t-1}> / |g_{t-1}|^2

Such steps are slow where the prior is stiff against the data: with curvature lambda and prior
precision 1/u a round goes lambda / (lambda + 1/u) of the way. Near an optimum
g_t = (I - omega A) g_{t-1}, where these shares are the eigenvalues of A. So r_t = 1 - omega a, with
a the mean of those that g_{t-1} sees, and omega_t = 1/a: the step of Barzilai and Borwein. No share
is above 1 for clients that reach their optimum, so every omega in (0, 2) converges (Salakhutdinov
and Roweis, "Adaptive overrelaxed bound optimization methods", 2003). The error of a cohort's mean
is gone in the next round, which makes r_t smaller: a noisy step is not lengthened.

The prior's mean stays at m0 while clients train. If m0 were the mean of their m_i at every moment,
the prior would damp what clients differ by and leave alone what they have in common. From a
gradient G a client goes D(lambda + 1/u) G in a direction with curvature lambda, where
D(x) = (1 - e^{-t x}) / x after the time t, the sum of its learning rates over |D_i|, momentum
included. With a mean that moves along, all of them together would go D(lambda) G. So tensor by
tensor the step is at least

    omega_l = D(lambda_l) / D(lambda_l + 1/u_l),     lambda_l = tr(H_l) / k_l (variance.py)

times as long, and at most 2. It is 1 in a tensor whose data decide, and 1 + 1/(u lambda) where
training converges. Where training ends early in a flat tensor, it is as much as the prior has taken
away there. Before the first measurement lambda counts as 0. omega_t is computed as if all
tensors had gone omega_{t-1} times as far; where some went further, it comes out smaller.

A prior N(0, Sigma / lambda0) on mu makes it N / (N + lambda0) of the clients' mean. As a factor in
every round m0 would lose as much whether clients have gone all the way or hardly begun. If mu were
at that place at every moment, the clients' pulls would add up to c times their mean,
c_l = lambda0 / (N + lambda0) / u_l: weight decay while they train.

    m0 <- e^{-t c_l} m0 + omega_l g_t,     omega_l = D(lambda_l + c_l) / D(lambda_l + 1/u_l)

The decay is that of directions without curvature, in which m0 has most of its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.empirical_bayes.variance import Evidence, steepness
from fedhb.network.vectors import per_weight

SHORTEST, LONGEST = 1.0, 2.0
LAST, FACTOR = "last_step", "omega"
"""The server's keys of g_{t-1} [d + h] and omega_{t-1} [1]."""


class Stretch(NamedTuple):
    """By what each weight's step is multiplied at least, and the share that it loses, [d + h]."""

    length: Tensor
    decay: Tensor


def at_rest(vectors: list[Tensor]) -> Arrays:
    """Return what the server keeps before the first round."""
    return {LAST: torch.zeros_like(torch.cat(vectors)), FACTOR: torch.ones_like(vectors[0][:1])}


def lengthened(
    server: Arrays, means: Arrays, keys: Sequence[str], stretch: Stretch | None = None
) -> Arrays:
    """Return the new vectors under these keys, and what the server keeps for its next step.

    Args:
        server: its state.
        means: where block-coordinate descent would go.
        keys: the vectors, of m0 and head.
        stretch: see `Stretch`; None where it does not apply.
    """
    steps = {key: means[key] - server[key] for key in keys}
    g = torch.cat(list(steps.values()))
    omega = factor(g, server[LAST], server[FACTOR].item())
    kept = {LAST: g, FACTOR: torch.full_like(server[FACTOR], omega)}
    if stretch is None:
        if omega == 1.0:
            return kept
        return {key: server[key] + omega * step for key, step in steps.items()} | kept
    moved = stretch.length.clamp_min(omega).to(g) * g
    moved -= stretch.decay.to(g) * torch.cat([server[key] for key in keys])
    parts = moved.split([len(step) for step in steps.values()])
    return {key: server[key] + part for key, part in zip(keys, parts, strict=True)} | kept


def factor(g: Tensor, before: Tensor, omega: float) -> float:
    """Return omega_t from g_t, g_{t-1} [k] and omega_{t-1}; 1 where there was no step before."""
    length = float(before.double().square().sum())
    if length == 0.0:
        return SHORTEST
    r = float(torch.dot(g.double(), before.double())) / length
    return min(LONGEST, max(SHORTEST, omega / (1.0 - r))) if r < 1.0 else LONGEST


def stretch_of(
    server: Arrays, summary: Arrays, sizes: Sequence[int], precision: Tensor, share: float
) -> Stretch:
    """Return omega_l and 1 - e^{-t c_l} of each weight.

    Args:
        server, summary: the state that clients received, and the sums of a round.
        sizes: d_l, of body and head.
        precision: 1/u [L].
        share: c u, in the body: mu is the body's alone.
    """
    body = torch.tensor(sizes, device=precision.device).cumsum(0) <= len(server["m0"])
    time = max(0.0, float(summary["time"] / summary["count"]))  # a client may send anything
    decay = share * precision * body
    omega = along(steepness(Evidence.of(server), sizes), precision, time, decay)
    return Stretch(per_weight(omega, sizes), per_weight(-torch.expm1(-time * decay), sizes))


def along(curvature: Tensor, precision: Tensor, time: float, decay: Tensor | float = 0.0) -> Tensor:
    """Return omega_l [L] of clients that trained for this time."""
    if time <= 0.0:
        return torch.ones_like(precision)
    ratio = _distance(curvature + decay, time) / _distance(curvature + precision, time)
    return ratio.clamp(SHORTEST, LONGEST)


def _distance(x: Tensor, time: float) -> Tensor:
    """Return D(x) = (1 - e^{-t x}) / x, which is t where x is 0."""
    return torch.where(x > 0, -torch.expm1(-time * x) / x, torch.full_like(x, time))
