"""The prior's variance by empirical Bayes, one for each tensor of the network (a "layer").

    theta_il ~ N(mu_l, u_l I),   q_i(theta_il) = N(m_il, v_il I),   l = 1..L layers of d_l weights

With h_il = tr(H_il) / d_l, the mean curvature of a client's loss, the expected loss is to second order
-log p(D_i | m_i) + 1/2 sum_l d_l v_il h_il. The best v_il is 1 / (1/u_l + h_il), and with it a client's objective is

    -log p(D_i | m_i) + 1/2 sum_l [ |m_il - m0_l|^2 / u_l + d_l log(1 + u_l h_il) ]

the negative log evidence of Laplace's approximation. A spike instead of q_i has no second term, and the u that fits best is then
the scatter of the m_i alone: a stiff prior, under which they scatter less, and so on to zero. With it, the best u_l for the
mean scatter s_l = mean_i |m_il - m0_l|^2 / d_l and curvature h_l is the positive root of h u^2 - s h u - s = 0: about sqrt(s / h)
where the data say little about a weight. docs/inference.md has the derivation.

`seen` [4, L] holds sums over the clients that have answered in any round: their number and their scatter, and the number of
those that measured their curvature and what they found. Clients hardly move in the last rounds, when the learning rate is small;
pooling the rounds keeps u from following them to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays, Plan, Problem
from fedhb.algorithms.batches import Batch
from fedhb.algorithms.local import Sgd
from fedhb.clients import Clients
from fedhb.network import Network, Weights
from fedhb.seeding import Randomness

MEASURED = 0.1
"""The share of clients that measure their curvature in a round."""

TINY = 1e-12
"""Scatter and curvature are not taken below it: a layer that never moves is held where it is."""


def layer_sizes(network: Network, with_head: bool) -> list[int]:
    """d_l: the weights of each tensor of the body, and of the head."""
    return [slot.stop - slot.start for slot in (*network.body_slots, *(network.head_slots if with_head else ()))]


def spread(values: Tensor, counts: Sequence[int]) -> Tensor:
    """One value per layer [L] as one per weight."""
    return values.repeat_interleave(torch.tensor(counts, device=values.device))


def means(vector: Tensor, counts: Sequence[int]) -> Tensor:
    """The mean over each layer's weights: [..., d] -> [..., L]."""
    return torch.stack([part.mean(-1) for part in vector.split(list(counts), -1)], -1)


def scatter(summary: Arrays, counts: Sequence[int]) -> Tensor:
    """sum_i |m_il - m0_l|^2 / d_l [L], from the summed squares of the body, and of the head where it has a prior."""
    squares = [summary[key] for key in ("squares", "head_squares") if key in summary]
    return means(torch.cat(squares) if len(squares) > 1 else squares[0], counts)


def best_variance(seen: Tensor) -> Tensor:
    """u [L]: the positive root of h u^2 - s h u - s = 0."""
    s, h = (seen[1] / seen[0]).clamp_min(TINY), _curvature(seen).clamp_min(TINY)
    return 0.5 * (s + (s.square() + 4.0 * s / h).sqrt())


def occam(u: Tensor, seen: Tensor, counts: Sequence[int]) -> Tensor:
    """1/2 sum_l d_l log(1 + u_l h_l), for the mean curvature."""
    return 0.5 * (torch.tensor(counts, device=u.device) * torch.log1p(u * _curvature(seen))).sum()


def _curvature(seen: Tensor) -> Tensor:
    """h [L], 0 before the first client has measured it."""
    return seen[3] / seen[2].clamp_min(1.0)


def measure(problem: Problem, weights: Weights, clients: Clients, plan: Plan, rng: Randomness) -> Tensor:
    """[C, 1 + L]: 1 and h_il for some clients, drawn by their own coins (in the first round for all), and zeros for the others.

    A gradient on one batch is a twelfth of a client's work in the paper's experiments, and the mean of few is good enough.
    """
    found = weights.theta.new_zeros(len(clients), 1 + len(layer_sizes(problem.network, plan.train_head)))
    for c, i in enumerate(clients.ids.tolist()):
        generator = rng(i, "curvature")
        if rng.round == 1 or float(torch.rand((), generator=generator)) < MEASURED:
            x, _ = clients.train.examples(c)
            row = slice(c, c + 1)
            at = Weights(weights.theta[row], weights.head[row], weights.buffers[row])
            found[c, 0], found[c, 1:] = 1.0, curvature(problem, at, x, plan, generator)
    return found


def curvature(problem: Problem, weights: Weights, x: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """h_il [L] of a client with the inputs x, with the Fisher information for H, estimated on one batch.

    Under targets drawn from the model itself gradients have mean zero, so B |g|^2 of a batch's mean gradient g is an unbiased
    estimate of the trace for one example.
    """
    network, chosen = problem.network, torch.randperm(len(x), generator=generator)[: plan.batch_size]
    some = x[chosen.to(x.device)].unsqueeze(0)
    y = problem.likelihood.sample(network.outputs(weights, some)[0], generator).unsqueeze(0)
    batch = Batch(slice(0, 1), some, y, chosen.unsqueeze(0), [len(chosen)], None, [generator], last_epoch=False)
    # in evaluation mode, as the targets: batch norm and dropout in training would shift the gradients' mean away from zero
    gradients = Sgd(network, weights, replace(plan, momentum=0.0)).gradients(batch, problem.likelihood, training=False)
    slots = [network.body_slots, network.head_slots]
    parts = [slot.of(g[0]) for g, own in zip(gradients, slots, strict=True) if g is not None for slot in own]
    return len(x) * len(chosen) * torch.stack([part.square().mean() for part in parts])
