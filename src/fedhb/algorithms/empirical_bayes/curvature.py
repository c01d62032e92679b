"""The measurements of a client after its update: the curvature of its loss, its time of training.

H_il stands for |D_i| F_l, F the Fisher information of one example at m_i. Under targets drawn from
the model itself, gradients have mean zero. So for the mean gradients g, g' of the two halves of a
batch, of B and B' examples, B |g|^2 is an unbiased estimate of tr(F), and B B' (g . g')^2 of
tr(F^2) where the halves share no example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Kind, Measurements, Problem
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights, tensor_sizes
from fedhb.seeding import Randomness
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd

SHARE = 0.1
"""The share of clients that measure their curvature in a round. A gradient on one batch is a
twelfth of a client's work in the paper's experiments, and the mean of few is good enough."""

ANSWERS: Mapping[str, Kind] = {
    "measured": Measurements(),  # [C, 1]: 1 from a client that measured
    "time": Measurements(),  # [C, 1]: `training_time`
    "curvature": Measurements(),  # [C, L]: h_il
    "curvature_squares": Measurements(),  # [C, L]: tr(H_il^2) / d_l^2
}
"""The measurements that clients send."""


def measure(
    problem: Problem, weights: Weights, clients: Clients, plan: Plan, rng: Randomness
) -> Arrays:
    """Measure at the weights of C clients, by the keys of ANSWERS.

    Each client draws whether it measures its curvature; in round 1 all do.
    """
    L = len(tensor_sizes(problem.network, plan.train_head))
    zeros = weights.theta.new_zeros
    measured, h, squares = zeros(len(clients), 1), zeros(len(clients), L), zeros(len(clients), L)
    for c, i in enumerate(clients.ids.tolist()):
        generator = rng(i, "curvature")
        if rng.round == 1 or float(torch.rand((), generator=generator)) < SHARE:
            x, _ = clients.train.examples(c)
            row = slice(c, c + 1)
            client = Weights(weights.theta[row], weights.head[row], weights.buffers[row])
            measured[c] = 1.0
            h[c], squares[c] = curvature(problem, client, x, plan, generator).chunk(2)
    time = training_time(clients.sizes, plan).to(h).unsqueeze(1)
    return {"measured": measured, "time": time, "curvature": h, "curvature_squares": squares}


def training_time(sizes: Tensor, plan: Plan) -> Tensor:
    """Return t [C]: how far a constant gradient of the summed loss takes clients of these sizes.

    With momentum from zero the steps s = 1..T go lr (1 - momentum^s) / (1 - momentum) each, on the
    mean loss.
    """
    steps = plan.epochs * torch.ceil(sizes.double() / plan.batch_size)
    beta = plan.momentum
    distance = steps - beta * (1.0 - beta**steps) / (1.0 - beta)
    return plan.lr / (1.0 - beta) * distance / sizes


def curvature(
    problem: Problem, weights: Weights, x: Tensor, plan: Plan, generator: torch.Generator
) -> Tensor:
    """Return h_il and tr(H_il^2) / d_l^2 [2 L] of a client with the inputs x, from one batch.

    With fewer than four examples, both halves are all of them.
    """
    n, chosen = len(x), torch.randperm(len(x), generator=generator)[: plan.batch_size]
    halves = (chosen[0::2], chosen[1::2]) if len(chosen) >= 4 else (chosen, chosen)
    first, second = (
        fisher_gradient(problem, weights, x[half.to(x.device)], plan, generator) for half in halves
    )
    B, B_second = (len(half) for half in halves)
    traces = torch.stack(
        [
            B * a.square().mean() + B_second * b.square().mean()
            for a, b in zip(first, second, strict=True)
        ]
    )
    products = torch.stack([(a * b).mean() for a, b in zip(first, second, strict=True)])
    return torch.cat([0.5 * n * traces, (n * math.sqrt(B * B_second) * products).square()])


def fisher_gradient(
    problem: Problem, weights: Weights, x: Tensor, plan: Plan, generator: torch.Generator
) -> list[Tensor]:
    """Return the mean gradient, tensor by tensor, for inputs x with targets drawn by the model."""
    network, inputs = problem.network, x.unsqueeze(0)
    y = problem.likelihood.sample(network.outputs(weights, inputs)[0], generator).unsqueeze(0)
    rows = torch.arange(len(x)).unsqueeze(0)
    batch = Batch(slice(0, 1), inputs, y, rows, [len(x)], None, [generator], last_epoch=False)
    solver = Sgd(network, weights, replace(plan, momentum=0.0))
    # in evaluation mode, like the targets: in training, batch norm and dropout would shift the mean
    gradients = solver.gradients(batch, problem.likelihood, training=False)
    parts = zip(gradients, (network.body_slots, network.head_slots), strict=True)
    return [slot.of(g[0]) for g, slots in parts if g is not None for slot in slots]
