"""Several networks on one server: their starts, one of them, and those that one client trained.

The server is given a single initial network, and the first learner begins there. Every other one
begins with the entries of each tensor of that network in another order. For tensors whose entries
were drawn independently, as torch does, this is as good as a new draw, at the tensor's own scale
and from the same distribution. Constant tensors (zero biases, the ones of a normalisation) stay as
they are. It would destroy a network that was trained before: there, `noise` is added to the initial
network instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.toolbox import SHARED, repeat, shared_parts
from fedhb.network.vectors import Slot, Weights
from fedhb.seeding import SERVER, Randomness

PARTS = ("theta", *SHARED)


def different_starts(
    problem: Problem, count: int, update: str, noise: float, rng: Randomness
) -> Arrays:
    """Return theta [M, d], and head [M, h] and buffers [M, b] where they are shared.

    A learner's start does not depend on M.
    """
    network, shared = problem.network, shared_parts(problem, update)
    generators = [rng(SERVER, f"learner {k}") for k in range(1, count)]

    def starts_of(vector: Tensor, slots: Sequence[Slot]) -> Tensor:
        others = [_another_start(vector, slots, noise, generator) for generator in generators]
        return torch.stack([vector, *others])

    starts = {"theta": starts_of(network.theta, network.body_slots)}
    if "head" in shared:
        starts["head"] = starts_of(network.head, network.head_slots)
    if "buffers" in shared:
        starts["buffers"] = repeat(network.buffers, count)
    return starts


def _another_start(
    vector: Tensor, slots: Sequence[Slot], noise: float, generator: torch.Generator
) -> Tensor:
    """Return the vector with noise, or with the entries of each tensor in another order."""
    if noise > 0:
        return vector + noise * torch.randn(len(vector), generator=generator).to(vector)
    orders = [
        slot.start + torch.randperm(slot.stop - slot.start, generator=generator) for slot in slots
    ]
    return vector[torch.cat(orders).to(vector.device)]


def learner_of(arrays: Arrays, k: int) -> Arrays:
    """Return learner k of what the server keeps or a client received."""
    return {key: arrays[key][k] for key in PARTS if key in arrays}


def side_by_side(learners: Sequence[Weights]) -> Weights:
    """Return M networks of each of C clients as [C, M, ...]."""
    return Weights(
        *(torch.stack([getattr(learner, key) for learner in learners], dim=1) for key in PARTS)
    )
