"""A round of FedBE."""

from __future__ import annotations

from problems import RNG, plan_of

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
