"""Answers of clients under differential privacy."""

from __future__ import annotations

import math
from dataclasses import replace

import builders

import fedhb
from fedhb.algorithms import Mixture
from fedhb.answers.privacy import FIXED, Mechanism
from fedhb.seeding import Randomness

PRIVATE = {
    "empirical-bayes": fedhb.EmpiricalBayes(),
    "niw-full": fedhb.NIW(dof="full", update="full"),
    "niw-coordinate": fedhb.NIW(dof="per_coordinate", update="body"),
    "mixture": Mixture(num_prototypes=3, noise=0.3),
    "fedavg": fedhb.FedAvg(),
    "fedprox": fedhb.FedProx(),
    "fedbabu": fedhb.FedBABU(),
}


RNG = Randomness(3, 1)


def privacy(**changes) -> Mechanism:
    return replace(
        Mechanism(noise=1.0, clip=0.05, delta=1e-5, num_clients=6, cohort=6, key=b"k" * 32),
        **changes,
    )


def answers(algorithm, model=None):
    """Return the problem, the server state, what six clients received, and their answers."""
    who = builders.clients()
    problem = builders.problem(model, who)
    server = algorithm.start(problem, Randomness(0))
    received = algorithm.broadcast(server, who.ids.tolist())
    found, _ = algorithm.local_update(
        problem, received, who, algorithm.remember(problem, who), builders.plan(algorithm), RNG
    )
    return problem, server, received, found


def length(sums) -> float:
    return math.sqrt(
        sum(float(v.double().square().sum()) for k, v in sums.items() if k not in FIXED)
    )
