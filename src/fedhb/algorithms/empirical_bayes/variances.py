"""The prior's variance by empirical Bayes, one for each tensor of the network (a "layer").

    theta_il ~ N(mu_l, u_l I),   q_i(theta_il) = N(m_il, v_il I),   l = 1..L layers of d_l weights

With h_il = tr(H_il) / d_l, the mean curvature of a client's loss, the expected loss is to second order
-log p(D_i | m_i) + 1/2 sum_l d_l v_il h_il. The best v_il is 1 / (1/u_l + h_il), and with it a client's objective is

    -log p(D_i | m_i) + 1/2 sum_l [ |m_il - m0_l|^2 / u_l + d_l log(1 + u_l h_il) ]

the negative log evidence of Laplace's approximation. A spike instead of q_i has no second term, and the u that fits best is then
the scatter of the m_i alone: a stiff prior, under which they scatter less, and so on to zero. With it, the best u_l for the
mean scatter s_l = mean_i |m_il - m0_l|^2 / d_l and curvature h_l is the positive root of h u^2 - s h u - s = 0: about sqrt(s / h)
where the data say little about a weight. docs/inference.md has the derivation.

Curvature is not alike in all directions of a layer. With k_l equal eigenvalues of H_il, and zeros, by their first two moments
k_l = tr(H_l)^2 / tr(H_l^2), the second term is k_l log(1 + u_l d_l h_il / k_l): only k_l directions pay an Occam factor, and the
best u_l is larger, the positive root of h u^2 - s (d/k) h u - s = 0. That is the better estimate of what clients differ by, and
the prior of a personalisation (`personal_variance`); in the rounds the other one holds clients together, and m0 gains from it.
Where clients take few steps, that prior is learned from gradients too (gradients.py).

`seen` [5, L] holds sums over the clients that have answered in any round: their number and their scatter, and the number of
those that measured their curvature, h_il and tr(H_il^2) / d_l^2. Clients hardly move in the last rounds, when the learning rate
is small; pooling the rounds keeps u from following them to zero. All of it is for kl_weight = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.empirical_bayes.few_steps import GRADIENTS, nothing, reach, variance
from fedhb.algorithms.empirical_bayes.few_steps import seen as seen_gradients
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd

PERSONAL = "personal_V0"
"""The key of V0 as a personalisation uses it."""

KEPT = ("evidence", GRADIENTS)
"""The keys of what the server keeps to itself."""

MEASURED = 0.1
"""The share of clients that measure their curvature in a round."""

TINY = 1e-12
"""Scatter and curvature are not taken below it."""


def layer_sizes(network: Network, with_head: bool) -> list[int]:
    """d_l: the weights of each tensor of the body, and of the head."""
    return [
        slot.stop - slot.start
        for slot in (*network.body_slots, *(network.head_slots if with_head else ()))
    ]


def spread(values: Tensor, counts: Sequence[int]) -> Tensor:
    """One value per layer [L] as one per weight."""
    return values.repeat_interleave(torch.tensor(counts, device=values.device))


def means(vector: Tensor, counts: Sequence[int]) -> Tensor:
    """The mean over each layer's weights: [..., d] -> [..., L]."""
    return torch.stack([part.mean(-1) for part in vector.split(list(counts), -1)], -1)


def common(summary: Arrays, counts: Sequence[int]) -> Tensor:
    """|sum_i (m_il - m0_l)|^2 / d_l [L]."""
    sums = [summary[key] for key in ("m", "head")[: 2 if "head_squares" in summary else 1]]
    return means(torch.cat([one.double().flatten() for one in sums]).square(), counts)


def scatter(summary: Arrays, counts: Sequence[int]) -> Tensor:
    """sum_i |m_il - m0_l|^2 / d_l [L], from the summed squares of the body, and of the head where it has a prior."""
    squares = [summary[key] for key in ("squares", "head_squares") if key in summary]
    return means(torch.cat(squares) if len(squares) > 1 else squares[0], counts)


def best_variance(seen: Tensor, ratio: Tensor | float = 1.0) -> Tensor:
    """u [L]: the positive root of h u^2 - s r h u - s = 0; r = d/k is 1 where all directions have curvature."""
    s, h = (seen[1] / seen[0]).clamp_min(TINY), _curvature(seen).clamp_min(TINY)
    around = s * ratio
    return 0.5 * (around + (around.square() + 4.0 * s / h).sqrt())


def personal_variance(seen: Tensor, counts: Sequence[int]) -> Tensor:
    """u [L] with curvature in k directions of each layer, k = tr(H)^2 / tr(H^2) between 1 and d."""
    return best_variance(seen, torch.tensor(counts).to(seen) / directions(seen, counts))


def directions(seen: Tensor, counts: Sequence[int]) -> Tensor:
    """k [L]."""
    h, size = _curvature(seen).clamp_min(TINY), torch.tensor(counts).to(seen)
    return (
        (h.square() * seen[2].clamp_min(1.0) / seen[4].clamp_min(TINY**2))
        .clamp_min(1.0)
        .minimum(size)
    )


def steepness(seen: Tensor, counts: Sequence[int]) -> Tensor:
    """tr(H_l) / k_l [L], the curvature in those directions that have some."""
    return torch.tensor(counts).to(seen) * _curvature(seen) / directions(seen, counts)


def unlearned(V0: Tensor) -> Arrays:
    """What the server holds before the first round: V0 [L] for both uses, and no evidence."""
    return {
        "V0": V0,
        PERSONAL: V0.clone(),
        "evidence": V0.new_zeros(5, len(V0), dtype=torch.float64),
    } | nothing(V0)


def learn(
    server: Arrays, summary: Arrays, counts: Sequence[int], n0: float, examples: float, most: float
) -> Arrays:
    """V0 [L] = n0 u for both uses, by the evidence of all clients that have answered, under the m0 that each received.

    What the gradients of clients with so many examples say counts up to `most`, what u is before anything is known.
    """
    s, found, L = scatter(summary, counts), summary["curvature"], len(counts)
    count = summary["count"].to(s)
    rows = [count.expand_as(s), s, found[0].expand_as(s), *found[2 : 2 + 2 * L].chunk(2)]
    seen = server["evidence"] + torch.stack(rows)
    new, personal = {"evidence": seen}, personal_variance(seen, counts)
    if GRADIENTS in server:  # not in runs that were begun without
        new[GRADIENTS] = sums = server[GRADIENTS] + seen_gradients(
            s, common(summary, counts), count, found[2 + 2 * L :]
        )
        told = variance(
            sums,
            _curvature(seen).clamp_min(TINY),
            steepness(seen, counts).clamp_min(TINY),
            examples,
        )
        personal = torch.where(sums[2] > 0, personal.maximum(told.clamp_max(most)), personal)
    known = seen[2] > 0  # nothing, before the first measurement
    return new | {
        key: torch.where(known, n0 * u, server[key].double()).to(server[key].dtype)
        for key, u in (("V0", best_variance(seen)), (PERSONAL, personal))
    }


def occam(u: Tensor, seen: Tensor, counts: Sequence[int]) -> Tensor:
    """1/2 sum_l d_l log(1 + u_l h_l), for the mean curvature."""
    return 0.5 * (torch.tensor(counts, device=u.device) * torch.log1p(u * _curvature(seen))).sum()


def _curvature(seen: Tensor) -> Tensor:
    """h [L], 0 before the first client has measured it."""
    return seen[3] / seen[2].clamp_min(1.0)


def measure(
    problem: Problem,
    found: Arrays,
    begun: Weights,
    clients: Clients,
    plan: Plan,
    rng: Randomness,
    held: Tensor | None,
) -> Tensor:
    """[C, 3 + 5 L] at what clients found (what they do not send is as it was when they began): 1, their time of training, h_il
    and tr(H_il^2) / d_l^2 for some clients, drawn by their own coins (in round 1 for all), else zeros but for the time; and
    their `reach` if they were held at m0, where they began, by this precision [L] (else None).

    A gradient on one batch is a twelfth of a client's work in the paper's experiments, and the mean of few is good enough.
    """
    own = [found["m"], *(found.get(key, getattr(begun, key)) for key in ("head", "buffers"))]
    L = len(layer_sizes(problem.network, plan.train_head))
    seen = begun.theta.new_zeros(len(clients), 3 + 5 * L)
    seen[:, 1] = training_time(clients.sizes, plan)
    for c, i in enumerate(clients.ids.tolist()):
        generator = rng(i, "curvature")
        if rng.round == 1 or float(torch.rand((), generator=generator)) < MEASURED:
            x, _ = clients.train.examples(c)
            weights = Weights(*(v[c : c + 1] for v in own))
            seen[c, 0], seen[c, 2 : 2 + 2 * L] = (
                1.0,
                curvature(problem, weights, x, plan, generator),
            )
    if held is not None:
        seen[:, 2 + 2 * L :] = reach(
            clients.sizes.tolist(), plan, held, problem.network.has_batch_norm
        ).to(seen)
    return seen


def training_time(sizes: Tensor, plan: Plan) -> Tensor:
    """t [C]: how far a constant gradient of the summed loss takes clients of these sizes, with momentum from zero.

    The steps s = 1..T go lr (1 - momentum^s) / (1 - momentum) each, on the mean loss.
    """
    steps, beta = plan.epochs * torch.ceil(sizes.double() / plan.batch_size), plan.momentum
    return plan.lr / (1.0 - beta) * (steps - beta * (1.0 - beta**steps) / (1.0 - beta)) / sizes


def curvature(
    problem: Problem, weights: Weights, x: Tensor, plan: Plan, generator: torch.Generator
) -> Tensor:
    """h_il and tr(H_il^2) / d_l^2 [2 L] of a client with the inputs x, with the Fisher information nF for H, from one batch.

    Under targets drawn from the model itself gradients have mean zero. So for the mean gradients g, g' of the two halves, of B
    and B' examples, B |g|^2 is an unbiased estimate of tr(F), and B B' (g . g')^2 of tr(F^2), but for pairs of an example with
    itself. Fewer than four examples are both halves.
    """
    n, chosen = len(x), torch.randperm(len(x), generator=generator)[: plan.batch_size]
    halves = (chosen[0::2], chosen[1::2]) if len(chosen) >= 4 else (chosen, chosen)
    one, other = (
        fisher_gradient(problem, weights, x[half.to(x.device)], plan, generator) for half in halves
    )
    B, B_other = (len(half) for half in halves)
    traces = torch.stack(
        [
            B * a.square().mean() + B_other * b.square().mean()
            for a, b in zip(one, other, strict=True)
        ]
    )
    products = torch.stack([(a * b).mean() for a, b in zip(one, other, strict=True)])
    return torch.cat([0.5 * n * traces, (n * math.sqrt(B * B_other) * products).square()])


def fisher_gradient(
    problem: Problem, weights: Weights, x: Tensor, plan: Plan, generator: torch.Generator
) -> list[Tensor]:
    """The mean gradient [tensor by tensor] on the inputs x with targets that the model draws."""
    network, some = problem.network, x.unsqueeze(0)
    y = problem.likelihood.sample(network.outputs(weights, some)[0], generator).unsqueeze(0)
    rows = torch.arange(len(x)).unsqueeze(0)
    batch = Batch(slice(0, 1), some, y, rows, [len(x)], None, [generator], last_epoch=False)
    # in evaluation mode, as the targets: batch norm and dropout in training would shift the gradients' mean away from zero
    gradients = Sgd(network, weights, replace(plan, momentum=0.0)).gradients(
        batch, problem.likelihood, training=False
    )
    slots = [network.body_slots, network.head_slots]
    return [
        slot.of(g[0])
        for g, own in zip(gradients, slots, strict=True)
        if g is not None
        for slot in own
    ]
