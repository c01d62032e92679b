"""The prior's variance u_l by empirical Bayes, a number for each tensor l of the network.

    theta_il ~ N(mu_l, u_l I),   q_i(theta_il) = N(m_il, v_il I),   l = 1..L tensors of d_l weights

With h_il = tr(H_il) / d_l, the mean curvature of a client's loss, the expected loss is to second
order -log p(D_i | m_i) + 1/2 sum_l d_l v_il h_il. The best v_il is 1 / (1/u_l + h_il). With it a
client's objective is the negative log evidence of Laplace's approximation:

    -log p(D_i | m_i) + 1/2 sum_l [ |m_il - m0_l|^2 / u_l + d_l log(1 + u_l h_il) ]

A spike instead of q_i has no second term. The u that fits best is then the scatter of the m_i
alone: a stiff prior, under which they scatter less, and so on to zero. With the second term the
best u_l for the mean scatter s_l = mean_i |m_il - m0_l|^2 / d_l and the mean curvature h_l is the
positive root of h u^2 - s h u - s = 0: about sqrt(s / h) where the data say little about a weight.
docs/inference.md has the derivation.

The curvature of a tensor differs between directions. With k_l equal eigenvalues of H_il, and zeros
besides, by their first two moments k_l = tr(H_l)^2 / tr(H_l^2), the second term is
k_l log(1 + u_l d_l h_il / k_l): only k_l directions pay an Occam factor. The best u_l is larger,
the positive root of h u^2 - s (d/k) h u - s = 0. It is the better estimate of how much clients
differ, and the prior of a personalisation. In the rounds the smaller u holds clients together, and
m0 gains from it. Where clients take few steps, gradients tell the personal variance too
(few_steps.py).

Clients hardly move in the last rounds, when the learning rate is small. Sums over the clients of
all rounds keep u from following them to zero. All of this is for kl_weight = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.empirical_bayes import few_steps
from fedhb.network.vectors import tensor_means

PERSONAL = "personal_V0"
"""The server's key of V0 as a personalisation uses it."""

SERVER_ONLY = ("evidence", few_steps.SUMS)
"""The server's keys that it does not send."""

TINY = 1e-12
"""The least scatter and curvature."""


class Evidence(NamedTuple):
    """Sums [L] over the clients that answered in any round; the rows of server["evidence"]."""

    answers: Tensor
    """How many clients answered."""
    scatter: Tensor
    """sum_i |m_il - m0_l|^2 / d_l, around the m0 that each client received."""
    measured: Tensor
    """How many of them measured their curvature."""
    curvature: Tensor
    """sum_i h_il over these."""
    squared_curvature: Tensor
    """sum_i tr(H_il^2) / d_l^2 over these."""

    @classmethod
    def of(cls, server: Arrays) -> Evidence:
        """Return the evidence that the server holds."""
        return cls(*server["evidence"])


def unlearned(V0: Tensor) -> Arrays:
    """Return the server's state before the first round: V0 [L] for both uses, no evidence."""
    evidence = V0.new_zeros(len(Evidence._fields), len(V0), dtype=torch.float64)
    return {"V0": V0, PERSONAL: V0.clone(), "evidence": evidence} | few_steps.nothing(V0)


# What the sums of a round tell ----------------------------------------------------------------


def scatter(summary: Arrays, sizes: Sequence[int]) -> Tensor:
    """Return sum_i |m_il - m0_l|^2 / d_l [L], of the head too where it has a prior."""
    squares = [summary[key] for key in ("squares", "head_squares") if key in summary]
    return tensor_means(torch.cat(squares) if len(squares) > 1 else squares[0], sizes)


def common_movement(summary: Arrays, sizes: Sequence[int]) -> Tensor:
    """Return |sum_i (m_il - m0_l)|^2 / d_l [L]."""
    keys = ("m", "head") if "head_squares" in summary else ("m",)
    sums = torch.cat([summary[key].double().flatten() for key in keys])
    return tensor_means(sums.square(), sizes)


# Variances from evidence ----------------------------------------------------------------------


def mean_curvature(evidence: Evidence) -> Tensor:
    """Return h [L], 0 before a client has measured it."""
    return evidence.curvature / evidence.measured.clamp_min(1.0)


def best_variance(evidence: Evidence, ratio: Tensor | float = 1.0) -> Tensor:
    """Return u [L], the positive root of h u^2 - s r h u - s = 0.

    r = d/k is 1 where all directions of a tensor have curvature.
    """
    s = (evidence.scatter / evidence.answers).clamp_min(TINY)
    h = mean_curvature(evidence).clamp_min(TINY)
    return 0.5 * (s * ratio + ((s * ratio).square() + 4.0 * s / h).sqrt())


def directions(evidence: Evidence, sizes: Sequence[int]) -> Tensor:
    """Return k = tr(H)^2 / tr(H^2) [L], between 1 and d."""
    h = mean_curvature(evidence).clamp_min(TINY)
    size = torch.tensor(sizes).to(h)
    squares = evidence.squared_curvature.clamp_min(TINY**2)
    k = h.square() * evidence.measured.clamp_min(1.0) / squares
    return k.clamp_min(1.0).minimum(size)


def personal_variance(evidence: Evidence, sizes: Sequence[int]) -> Tensor:
    """Return u [L] where k directions of each tensor have curvature."""
    k = directions(evidence, sizes)
    return best_variance(evidence, torch.tensor(sizes).to(k) / k)


def steepness(evidence: Evidence, sizes: Sequence[int]) -> Tensor:
    """Return tr(H_l) / k_l [L], the curvature in those directions that have some."""
    h = mean_curvature(evidence)
    return torch.tensor(sizes).to(h) * h / directions(evidence, sizes)


def occam(u: Tensor, evidence: Evidence, sizes: Sequence[int]) -> Tensor:
    """Return 1/2 sum_l d_l log(1 + u_l h_l), for the mean curvature."""
    size = torch.tensor(sizes, device=u.device)
    return 0.5 * (size * torch.log1p(u * mean_curvature(evidence))).sum()


def learn(
    server: Arrays, summary: Arrays, sizes: Sequence[int], n0: float, examples: float, most: float
) -> Arrays:
    """Return the server's new variances and evidence.

    Args:
        server: V0 [L] = n0 u for both uses, and the sums so far.
        summary: the sums of a round.
        sizes: d_l.
        n0: the scale of V0.
        examples: the mean number of examples of a client.
        most: the largest u that gradients may tell: u before anything is known.
    """
    s = scatter(summary, sizes)
    count = summary["count"].to(s)
    measured = summary["measured"].expand_as(s)
    rows = (count.expand_as(s), s, measured, summary["curvature"], summary["curvature_squares"])
    new = {"evidence": server["evidence"] + torch.stack(rows)}
    evidence = Evidence.of(new)
    h = mean_curvature(evidence).clamp_min(TINY)
    steep = steepness(evidence, sizes).clamp_min(TINY)
    around = common_movement(summary, sizes)
    new[few_steps.SUMS] = server[few_steps.SUMS] + few_steps.sums_of(s, around, summary)
    gradients = few_steps.GradientSums(*new[few_steps.SUMS])
    personal = personal_variance(evidence, sizes)
    told = few_steps.variance(gradients, h, steep, examples).clamp_max(most)
    personal = torch.where(gradients.clients > 0, personal.maximum(told), personal)
    known = evidence.measured > 0  # nothing is known before the first measurement
    for key, u in (("V0", best_variance(evidence)), (PERSONAL, personal)):
        new[key] = torch.where(known, n0 * u, server[key].double()).to(server[key].dtype)
    return new
