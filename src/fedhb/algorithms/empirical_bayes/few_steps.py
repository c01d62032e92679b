"""NIW's personal prior where clients take few steps in a round: by the scatter of their gradients at m0, not of what they found.

What clients were seen to differ by after one step says how long they trained. But how far they went along their gradients is
known. With unit slope in step b alone a client moves by w_b, which momentum and the prior's pull decide (below); so it moves by
sum_b w_b times a mean of its batches' gradients. In k directions of curvature lambda for each example, with optima that differ
by u and examples that differ by as much as makes their curvature, the mean gradient over |D_i| examples deviates from the
federation's g by k lambda^2 u, and a batch's, of B_b of them, by k lambda / B_b more. With W = sum_b w_b, R = sum_b w_b^2 / B_b,

    E |m_i - m0|^2 = W_i^2 ( |g|^2 + k lambda^2 u ) + k lambda R_i

(over several epochs, which take the same examples again, R = W^2 / |D_i| + sum_e [ sum_{b in e} w_b^2 / B_b - W_e^2 / |D_i| ]).
For a cohort of n with X = sum_i |m_i - m0|^2, Y = |sum_i (m_i - m0)|^2, and r = sum_i W_i^2 / (sum_i W_i)^2, the share of g drops
out of

    (X - r Y) / (1 - r)  =  k lambda^2 u sum_i W_i^2 + k lambda sum_i R_i

whose means over all clients that have answered give u. Curvature on the way is left out: few steps are far from an optimum, and
where they are not, u comes out small. It is one estimate a layer, and the layers' gradients are nearly collinear, so that each
has the others' differences in it: it counts where clients take fewer than FEW steps, if it is larger than what scatter says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays
from fedhb.training.batches import batch_bounds
from fedhb.training.plan import Plan

FEW = 6
"""Steps of a client in a round that are few: with one or two a prior by scatter is far too stiff, with five both are the same."""

GRADIENTS = "gradients"
"""The key of what the server keeps [3, L]: sums of (X - r Y) / (1 - r) and R, by the mean of W^2, and of n, over cohorts."""

MOST = 0.9
"""The largest r: a client may say anything."""


def nothing(V0: Tensor) -> Arrays:
    """What the server holds before the first round, for V0 [L]."""
    return {GRADIENTS: V0.new_zeros(3, len(V0), dtype=torch.float64)}


def reach(sizes: Sequence[int], plan: Plan, precision: Tensor, merge_single: bool) -> Tensor:
    """1, W, W^2 and R [C, 1 + 3 L] of clients of these sizes under a prior of this precision [L]; zeros of many steps."""
    held = precision.double().cpu().numpy()
    found = {n: torch.from_numpy(_reach(n, plan, held, merge_single)) for n in set(sizes)}
    return torch.stack([found[n] for n in sizes]).to(precision.device)


def _reach(n: int, plan: Plan, precision: np.ndarray, merge_single: bool) -> np.ndarray:
    """The same [1 + 3 L] of a client with n examples."""
    batches = np.diff(
        [0, *(stop for _, stop in batch_bounds(n, plan.batch_size, merge_single))]
    ).reshape(-1, 1)
    if plan.epochs * len(batches) >= FEW:
        return np.zeros(1 + 3 * len(precision))
    pull = precision / n
    keep, found = 1.0 / (1.0 + plan.lr * pull), []
    v, m = np.ones_like(pull), np.zeros_like(pull)
    for _ in range(
        plan.epochs * len(batches)
    ):  # what a unit slope in the first step has moved by then: proximal.py
        v = keep * (v + pull * m)
        m = m - plan.lr * v
        v = plan.momentum * v
        found.append(-m)
    w = np.stack(found[::-1]).reshape(plan.epochs, len(batches), -1)
    W, each = w.sum((0, 1)), w.sum(1)
    R = W**2 / n + ((w**2 / batches).sum(1) - each**2 / n).sum(0)
    return np.concatenate([np.ones(1), W, W**2, R])


def seen(scatter: Tensor, common: Tensor, count: Tensor, reached: Tensor) -> Tensor:
    """A cohort's share of what the server keeps, from X / d, Y / d [L] and its sum of `reach`; zeros if one took many steps."""
    W, squares, R = reached[1:].chunk(3)
    if count < 2 or reached[0] < count or (squares <= 0).any():
        return torch.zeros(3, len(W)).to(scatter)
    r = (squares / W.square()).clamp(1.0 / float(count), MOST)
    around = (scatter - r * common).clamp_min(0.0) / (1.0 - r)
    return torch.stack([around * count / squares, R * count / squares, count.expand_as(R)])


def variance(sums: Tensor, h: Tensor, steepness: Tensor, examples: float) -> Tensor:
    """u [L] from the curvature h and k lambda / k of clients with so many examples; 0 or less where their data explain all."""
    count = sums[2].clamp_min(1.0)
    return (sums[0] - h * sums[1] / examples) * examples**2 / (h * steepness * count)
