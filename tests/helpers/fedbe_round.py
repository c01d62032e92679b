"""A round of FedBE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from problems import (
    RNG,
    normal,
    plan_of,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Arrays, Problem
from fedhb.algorithms.fedbe import FedBE
from fedhb.clients.clients import Clients

TRAINING = {
    "rounds": 3,
    "fraction": 0.6,
    "local_epochs": 2,
    "batch_size": 4,
    "seed": 2,
    "schedule": "constant",
    "progress": False,
}


def one_round(
    algorithm: FedBE, problem: Problem, clients: Clients
) -> tuple[Arrays, Arrays, Arrays]:
    """The server before a round, what its clients found, and their sums."""
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, clients.ids.tolist())
    plan = plan_of(epochs=2, train_head=algorithm.update == "full")
    found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
    return server, found, algorithm.summarise(problem, received, found, RNG)


def with_inputs(clients: Clients, count: int = 11, seed: int = 9) -> Clients:
    """Return the clients, beside a server that holds unlabelled inputs."""
    return replace(
        clients, server_inputs=normal(count, *clients.train.x.shape[1:], seed=seed).float()
    )


def holding(problem: Problem, x: Tensor) -> Problem:
    return replace(problem, federation=replace(problem.federation, server_inputs=x))


def fitted(module: nn.Module, clients: Clients, algorithm: Any) -> fedhb.run.Run:
    return fedhb.fit(module, clients, algorithm, **TRAINING)
