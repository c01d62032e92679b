"""The personal variance where clients take few steps in a round: from how their gradients scatter.

How far a client goes in one step says how long it trained, not how far its optimum is. But how far
it went along its gradients is known. With unit slope in step b alone a client moves by w_b, which
momentum and the prior's pull decide. So it moves by W = sum_b w_b times a mean of its batches'
gradients. Let a tensor have curvature lambda for each example in k directions, optima that differ
by u (squared) between clients, and gradients of single examples with the variance that the Fisher
information lambda gives them. The squared deviation of the mean gradient over |D_i| examples from
the federation's g is k lambda^2 u; that of a batch of B_b of them is larger by k lambda / B_b. With
R = sum_b w_b^2 / B_b,

    E |m_i - m0|^2 = W_i^2 ( |g|^2 + k lambda^2 u ) + k lambda R_i

(over several epochs, which take the same examples again,
R = W^2 / |D_i| + sum_e [ sum_{b in e} w_b^2 / B_b - W_e^2 / |D_i| ]). For a cohort with
X = sum_i |m_i - m0|^2, Y = |sum_i (m_i - m0)|^2 and r = sum_i W_i^2 / (sum_i W_i)^2, g drops out of

    (X - r Y) / (1 - r)  =  k lambda^2 u sum_i W_i^2 + k lambda sum_i R_i

whose means over all clients that have answered give u. Curvature on the way is left out: few steps
are far from an optimum, and where they are not, u comes out small. The tensors' gradients are
nearly collinear, so each estimate contains the others' differences. It counts where clients take
fewer than FEW steps, if it is larger than what the scatter says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Kind, Measurements
from fedhb.training.batches import batch_bounds
from fedhb.training.plan import Plan

FEW = 6
"""Fewer steps of a client in a round than this are few. With one or two, a prior by scatter is far
too stiff; with five both are the same."""

SUMS = "gradients"
"""The server's key of GradientSums [3, L]."""

LARGEST_SHARE = 0.9
"""The largest r, because a client may send anything."""

ANSWERS: Mapping[str, Kind] = {
    "reach_count": Measurements(),  # [C, 1]: 1 from a client that took few steps
    "reach": Measurements(),  # [C, L]: W
    "reach_squares": Measurements(),  # [C, L]: W^2
    "reach_noise": Measurements(),  # [C, L]: R
}
"""The numbers that clients send; zeros from clients that took many steps."""


class GradientSums(NamedTuple):
    """Sums [L] over cohorts; the rows of server[SUMS]."""

    scatter: Tensor
    """(X - r Y) / (1 - r) divided by the mean of W^2."""
    noise: Tensor
    """R divided by the mean of W^2."""
    clients: Tensor
    """The number of clients."""


def nothing(V0: Tensor) -> Arrays:
    """Return the server's sums before the first round, for V0 [L]."""
    return {SUMS: V0.new_zeros(len(GradientSums._fields), len(V0), dtype=torch.float64)}


def reach(sizes: Sequence[int], plan: Plan, precision: Tensor, merge_single: bool) -> Arrays:
    """Return how far unit slopes take clients of these sizes under this precision [L].

    The keys are those of ANSWERS; a client of many steps has zeros.
    """
    stiffness = precision.double().cpu().numpy()
    by_size = {n: _reach_of(n, plan, stiffness, merge_single) for n in set(sizes)}
    rows = torch.stack([torch.from_numpy(by_size[n]) for n in sizes]).to(precision.device)
    L = len(precision)
    return dict(zip(ANSWERS, rows.split([1, L, L, L], dim=1), strict=True))


def _reach_of(n: int, plan: Plan, precision: np.ndarray, merge_single: bool) -> np.ndarray:
    """Return 1, W, W^2 and R [1 + 3 L] of a client with n examples."""
    stops = [stop for _, stop in batch_bounds(n, plan.batch_size, merge_single)]
    batches = np.diff([0, *stops]).reshape(-1, 1)
    steps = plan.epochs * len(batches)
    if steps >= FEW:
        return np.zeros(1 + 3 * len(precision))
    pull = precision / n
    keep = 1.0 / (1.0 + plan.lr * pull)
    v, m = np.ones_like(pull), np.zeros_like(pull)
    moved = []
    for _ in range(steps):  # how far a unit slope in the first step has moved m: proximal.py
        v = keep * (v + pull * m)
        m = m - plan.lr * v
        v = plan.momentum * v
        moved.append(-m)
    w = np.stack(moved[::-1]).reshape(plan.epochs, len(batches), -1)
    W, W_epoch = w.sum((0, 1)), w.sum(1)
    R = W**2 / n + ((w**2 / batches).sum(1) - W_epoch**2 / n).sum(0)
    return np.concatenate([np.ones(1), W, W**2, R])


def sums_of(scatter: Tensor, common: Tensor, summary: Arrays) -> Tensor:
    """Return a cohort's part of the sums [3, L]; zeros if a client took many steps.

    Args:
        scatter: X / d [L].
        common: Y / d [L].
        summary: the cohort's sums of ANSWERS and its `count`.
    """
    count = summary["count"].to(scatter)
    W, squares, R = (summary[key] for key in ("reach", "reach_squares", "reach_noise"))
    if count < 2 or summary["reach_count"] < count or (squares <= 0).any():
        return torch.zeros(len(GradientSums._fields), len(W)).to(scatter)
    r = (squares / W.square()).clamp(1.0 / float(count), LARGEST_SHARE)
    around = (scatter - r * common).clamp_min(0.0) / (1.0 - r)
    return torch.stack([around * count / squares, R * count / squares, count.expand_as(R)])


def variance(sums: GradientSums, h: Tensor, steepness: Tensor, examples: float) -> Tensor:
    """Return u [L] for clients with so many examples; 0 or less where their data explain all.

    Args:
        sums: over all cohorts so far.
        h: the mean curvature, k lambda |D_i| / d.
        steepness: the curvature in the directions that have some, lambda |D_i|.
        examples: the mean number of examples of a client.
    """
    count = sums.clients.clamp_min(1.0)
    unexplained = sums.scatter - h * sums.noise / examples
    return unexplained * examples**2 / (h * steepness * count)
