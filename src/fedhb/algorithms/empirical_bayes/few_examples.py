"""Personalisation with few examples: as many steps as with many.

A personal posterior is where a client's objective, its loss and its prior's part, is least. SGD
takes about as many steps to get there whatever the number of examples is, but an epoch of fewer
examples has fewer steps. So epochs are doubled for clients with few examples, until they hold about
as many steps as those of a client with the federation's mean number. This is for methods whose
prior holds such a client where it should be. Without a prior it would only overfit.

The running statistics b of batch norm have no prior in the objective, and in so many steps become
those of two or three examples. A client with n examples gets what it would estimate under a prior
that counts like PRIOR_EXAMPLES: (n b_i + PRIOR_EXAMPLES b) / (n + PRIOR_EXAMPLES).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Federation, Personalised, Problem
from fedhb.clients.clients import Clients
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

PRIOR_EXAMPLES = 3
"""Examples that the federation's running statistics count for (measured: docs/inference.md)."""


def epoch_factors(sizes: Tensor, plan: Plan, federation: Federation) -> list[int]:
    """Return by what the epochs of each client are multiplied.

    It is the power of two nearest to the ratio of steps in an epoch, and at least 1.
    """
    usual = math.ceil(federation.num_examples / federation.num_clients / plan.batch_size)
    steps = [max(1, math.ceil(n / plan.batch_size)) for n in sizes.tolist()]
    return [2 ** max(0, round(math.log2(usual / n))) for n in steps]


def in_as_many_steps(
    personalise: Callable[..., Personalised],
    problem: Problem,
    server: Arrays,
    clients: Clients,
    memory: Arrays,
    plan: Plan,
    rng: Randomness,
) -> Personalised:
    """Personalise clients with the same factor together; return all in their order."""
    factors = epoch_factors(clients.sizes, plan, problem.federation)
    groups = [[c for c, f in enumerate(factors) if f == factor] for factor in sorted(set(factors))]
    parts = []
    for rows in groups:
        factor = factors[rows[0]]
        memories = {key: value[rows] for key, value in memory.items()}
        longer = replace(plan, epochs=plan.epochs * factor)
        arrays = personalise(problem, server, clients.select(rows), memories, longer, rng).arrays()
        if factor > 1 and "buffers" in server:
            n = clients.sizes[rows].to(arrays["buffers"]).view(-1, 1, 1)
            weighted = n * arrays["buffers"] + PRIOR_EXAMPLES * server["buffers"]
            arrays["buffers"] = weighted / (n + PRIOR_EXAMPLES)
        parts.append(arrays)
    order = torch.tensor([c for rows in groups for c in rows]).argsort()
    joined = {key: torch.cat([arrays[key] for arrays in parts])[order] for key in parts[0]}
    return Personalised(problem, **joined)
