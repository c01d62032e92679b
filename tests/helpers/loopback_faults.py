"""Faults of nodes in this process, and the events that a server wrote."""

from __future__ import annotations

import json

from fedhb.algorithms import build
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.runs.from_settings import make_clients
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan


def events(out):
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def without(settings, positions):
    """The server's state after one round of the simulator with these clients alone."""
    clients, _ = make_clients(settings)
    from fedhb.flower.census import Census, Facts
    from fedhb.flower.federated_task import FederatedTask
    from fedhb.flower.node import Node

    census = Census.of(
        [Facts.of(Node(clients.select([k]), True, False)) for k in range(len(clients))]
    )
    task = FederatedTask.of(settings, census)
    rng, algorithm = Randomness(settings.seed, 1), build(settings.algorithm)
    server = algorithm.start(task.problem, Randomness(settings.seed))
    lr = settings.training.lr  # the step schedule of a single round
    plan = Plan(
        settings.training.local_epochs,
        settings.training.batch_size,
        lr,
        settings.training.momentum,
        algorithm.update == "full",
    )
    sums, _ = InProcess(task.problem, algorithm, clients, ClientStore()).run(
        server, positions, plan, rng
    )
    return algorithm.aggregate(task.problem, server, sums, rng)
