"""Simulated hostile clients: answers are turned round, blown up, no numbers, or mislabelled."""

from __future__ import annotations

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
    """Return the positions of the hostile clients."""
    generator = Randomness(seed)(SERVER, "hostile")
    order = torch.randperm(num_clients, generator=generator)
    return sorted(order[: round(share * num_clients)].tolist())


def attacked(
    algorithm: Any, clients: Clients, attack: str, share: float, seed: int
) -> tuple[Any, Clients]:
    """Return the algorithm and the clients of a federation with this share of hostile clients."""
    if attack not in ATTACKS:
        raise InputError(f"attack={attack!r}: choose {', '.join(ATTACKS)}")
    positions = choose(len(clients), share, seed)
    if attack != "label-flip":
        ids = tuple(clients.ids[positions].tolist())
        return Hostile(algorithm, ids, FACTORS[attack]), clients
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
    """An algorithm some of whose clients multiply the differences that they send by a factor."""

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
        """Return honest answers, but false ones of the hostile clients."""
        answers, new = self.algorithm.local_update(problem, received, clients, memory, plan, rng)
        by = torch.ones(len(clients))
        by[[k for k, i in enumerate(clients.ids.tolist()) if i in self.ids]] = self.factor
        if (by != 1.0).any():
            vectors = Vectors.of(answers, received, self.algorithm)
            vectors.scale(by)
            answers = answers | vectors.arrays()
        return answers, new
