"""Personalisation with few examples: as many steps as with many.

A personal posterior is where a client's objective, its loss and what its prior adds, is least. SGD takes about as many steps to
get there whatever the number of examples is, but an epoch of fewer examples has fewer. So epochs are doubled for clients with
few, until they hold about as many steps as those of a client with the federation's mean number. That is for methods whose prior
holds a client with few examples where it should be; without one it would only overfit.

Batch norm's running statistics b have no prior in the objective, and in so many steps become those of two examples or three.
They are what a client with n of its own would estimate under a prior that counts like COUNT: (n b_i + COUNT b) / (n + COUNT).
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

COUNT = 3
"""Examples that the federation's running statistics count for. Measured: docs/inference.md."""


def factors(sizes: Tensor, plan: Plan, federation: Federation) -> list[int]:
    """What each client's epochs are multiplied by: the power of two nearest to the ratio of steps an epoch, at least 1."""
    usual = math.ceil(federation.num_examples / federation.num_clients / plan.batch_size)
    steps = [max(1, math.ceil(n / plan.batch_size)) for n in sizes.tolist()]
    return [2 ** max(0, round(math.log2(usual / own))) for own in steps]


def in_as_many_steps(
    personalise: Callable[..., Personalised],
    problem: Problem,
    server: Arrays,
    clients: Clients,
    memory: Arrays,
    plan: Plan,
    rng: Randomness,
) -> Personalised:
    """`personalise` for clients of like factors together, put back in their order."""
    wanted = factors(clients.sizes, plan, problem.federation)
    groups = [
        [c for c, own in enumerate(wanted) if own == factor] for factor in sorted(set(wanted))
    ]
    arrays = []
    for rows in groups:
        kept = {key: value[rows] for key, value in memory.items()}
        longer = replace(plan, epochs=plan.epochs * wanted[rows[0]])
        found = personalise(problem, server, clients.select(rows), kept, longer, rng).arrays()
        if wanted[rows[0]] > 1 and "buffers" in server:
            n = clients.sizes[rows].to(found["buffers"]).view(-1, 1, 1)
            found["buffers"] = (n * found["buffers"] + COUNT * server["buffers"]) / (n + COUNT)
        arrays.append(found)
    order = torch.tensor([c for rows in groups for c in rows]).argsort()
    return Personalised(
        problem, **{key: torch.cat([one[key] for one in arrays])[order] for key in arrays[0]}
    )
