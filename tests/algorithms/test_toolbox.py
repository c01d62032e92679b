"""Sums over clients."""

from __future__ import annotations

from typing import Any

import pytest
from problems import RNG, batch_normed, labelled, mixture, niw, plan_of, problem_of, same_bits
from torch import Tensor

from fedhb.algorithms import Arrays, FedAvg, FedProx


@pytest.mark.filterwarnings("ignore:.*running statistics")
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(),
        FedProx(update="full"),
        niw(update="full"),
        mixture(update="full", num_prototypes=3),
    ],
)
def test_sums_leave_what_they_are_given_as_it_is(algorithm: Any) -> None:
    """In float64 above all, where to convert an array does not copy it."""
    clients = labelled(9, 6)
    problem = problem_of(batch_normed(), clients)
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, [0, 1])
    found, _ = algorithm.local_update(problem, received, clients, {}, plan_of(train_head=True), RNG)

    def copies(arrays: Arrays) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in arrays.items()}

    given = [server, received, found]
    before = [copies(arrays) for arrays in given]
    algorithm.aggregate(problem, server, algorithm.summarise(problem, received, found, RNG), RNG)
    for arrays, original in zip(given, before, strict=True):
        assert same_bits(arrays, original)
