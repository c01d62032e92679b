"""Clients that mean harm, simulated: what they find is turned round, blown up, no number, or learned from false labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.answers.defence import Vectors
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.seeding import SERVER, Randomness
from fedhb.training.plan import Plan

ATTACKS = ("sign-flip", "scale", "label-flip", "nan")
FACTORS = {"sign-flip": -1.0, "scale": 10.0, "nan": float("nan")}


def choose(num_clients: int, share: float, seed: int) -> list[int]:
    """The positions of the clients that mean harm."""
    generator = Randomness(seed)(SERVER, "hostile")
    return sorted(
        torch.randperm(num_clients, generator=generator)[: round(share * num_clients)].tolist()
    )


def attacked(
    algorithm: Any, clients: Clients, attack: str, share: float, seed: int
) -> tuple[Any, Clients]:
    """The federation with this share of hostile clients. They train as the others do; their data are theirs to spoil."""
    if attack not in ATTACKS:
        raise InputError(f"attack={attack!r}: choose {', '.join(ATTACKS)}")
    positions = choose(len(clients), share, seed)
    if attack != "label-flip":
        return Hostile(algorithm, tuple(clients.ids[positions].tolist()), FACTORS[attack]), clients
    if clients.num_classes is None:
        raise InputError("attack='label-flip' needs classes: choose another attack")
    y = clients.train.y.clone()
    for k in positions:
        rows = clients.train.rows_of(k)
        y[rows] = clients.num_classes - 1 - y[rows]
    files = {**clients.files, "labels": f"flipped {share} {seed}"}
    return algorithm, replace(clients, train=replace(clients.train, y=y), files=files)


@dataclass(frozen=True)
class Hostile:
    """An algorithm some of whose clients multiply what they found, as a difference to what they were sent, by a factor."""

    algorithm: Any
    ids: tuple[int, ...]
    factor: float

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "algorithm"), name)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """What the clients found, and what the hostile ones say they did."""
        found, new = self.algorithm.local_update(problem, received, clients, memory, plan, rng)
        rows = [k for k, i in enumerate(clients.ids.tolist()) if i in self.ids]
        if rows:
            found = found | _multiplied(found, received, self.algorithm.each, rows, self.factor)
        return found, new


def _multiplied(
    found: Arrays, received: Arrays, each: Sequence[str], rows: Sequence[int], factor: float
) -> Arrays:
    vectors = Vectors.of(found, received, each)
    by = torch.ones(len(next(iter(found.values()))))
    by[list(rows)] = factor
    vectors.scale(by)
    return vectors.arrays()
