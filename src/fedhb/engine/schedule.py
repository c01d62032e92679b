"""Which clients take part in a round, and the learning rate of the round."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fedhb.errors import InputError
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import SCHEDULES

Draw = Callable[[int], list[int]]
"""A function from a round's number to the positions of its clients."""

SPARSE = 20
"""A population this many times the cohort is not shuffled: that would take longer than training."""


def cohort(num_clients: int, fraction: float, rng: Randomness) -> list[int]:
    """Return the positions of a round's clients, drawn without replacement, in ascending order.

    There are N_f = floor(f N) of them, at least one.
    """
    count, generator = cohort_size(num_clients, fraction), rng(SERVER, "cohort")
    if SPARSE * count >= num_clients:
        return sorted(torch.randperm(num_clients, generator=generator)[:count].tolist())
    chosen: dict[int, None] = {}  # in the order of their first draw
    while len(chosen) < count:
        chosen.update(
            dict.fromkeys(torch.randint(num_clients, (2 * count,), generator=generator).tolist())
        )
    return sorted(list(chosen)[:count])


def by_seed(num_clients: int, fraction: float, seed: int) -> Draw:
    """Return the function from a round's number to the cohort that follows from the seed."""
    return lambda round_number: cohort(num_clients, fraction, Randomness(seed, round_number))


def cohort_size(num_clients: int, fraction: float) -> int:
    """Return the number of clients in a round, N_f = floor(f N), at least one."""
    if not 0 < fraction <= 1:
        raise InputError(
            f"fraction={fraction}: give the share of clients in a round, above 0 and at most 1"
        )
    return max(1, math.floor(fraction * num_clients + 1e-9))  # 0.29 * 100 is 28.999...


def learning_rate(schedule: str, lr: float, done: int, rounds: int) -> float:
    """Return the learning rate after `done` of the rounds.

    Args:
        schedule: "step" multiplies it by 0.1 at 1/2 and again at 3/4 of the rounds; "constant";
            "cosine".
        lr: the learning rate of the first round.
        done: how many rounds are done.
        rounds: how many there are.
    """
    if schedule == "step":
        half = max(1, rounds // 2)  # of one round, or two, the first has the whole rate
        return lr * 0.1 ** ((done >= half) + (done >= max(half + 1, 3 * rounds // 4)))
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * done / rounds))
    if schedule == "constant":
        return lr
    raise InputError(f"schedule={schedule!r}: choose {', '.join(SCHEDULES)}")
