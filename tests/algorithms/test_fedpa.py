"""FedPA: its samples of a client, and the step of its server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    TRAINING,
    batch_normed,
    initial,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    same_network,
    seeded,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Arrays, FedAvg
from fedhb.algorithms.fedpa import FedPA
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.training.average import Iterates
from fedhb.training.sgd import train


def trained(
    module: nn.Module, algorithm: Any, sizes: tuple[int, ...] = (9, 6, 4, 7, 8), **options: Any
) -> Arrays:
    return fedhb.fit(module, labelled(*sizes), algorithm, **(TRAINING | options)).state.server


def test_warm_up_ends_after_its_rounds_and_is_counted_by_the_server() -> None:
    algorithm, clients = FedPA(update="body", warm_up=2), labelled(9, 6, 4)
    run = fedhb.fit(mlp(4, 5, 3), clients, algorithm, **(TRAINING | {"rounds": 4}))
    assert [record["sampled"] for record in run.records] == [False, False, True, True]
    assert run.state.server["rounds"].item() == 4
    # What is sent says so, at no cost, and holds nothing else.
    d = run.problem.network.num_params
    sent = algorithm.broadcast(run.state.server, [0])
    assert sent.keys() == {"theta", "sample"} and sent["sample"].numel() == 0
    assert algorithm.broadcast(algorithm.start(run.problem, RNG), [0]).keys() == {"theta"}
    assert {record["down_bytes"] for record in run.records} == {d * 8 * run.records[0]["clients"]}


@pytest.mark.parametrize(
    ("size", "batch", "burn_in", "segments", "expected"),
    [
        (10, 1, 0.2, 4, [[3, 4], [5, 6], [7, 8], [9, 10]]),
        (
            50,
            10,
            0.2,
            4,
            [[2], [3], [4], [5]],
        ),  # the authors' five epochs: one of burn-in, a sample from each of the others
        (10, 1, 0.5, 4, [[6], [7], [8], [9, 10]]),
        (10, 1, 0.0, 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10]]),
        (10, 1, 1.0, 4, [[10]]),  # all but the last iterate is burn-in
        (10, 1, 0.3, 1, [[4, 5, 6, 7, 8, 9, 10]]),
        (8, 4, 0.2, 4, [[1], [2]]),  # two steps give two samples
        (3, 4, 0.2, 4, [[1]]),
        (9, 4, 0.0, 2, [[1], [2, 3]]),  # 4 of 9 examples, 8 of 9, 9 of 9
    ],
)
def test_segments_by_hand(
    size: int, batch: int, burn_in: float, segments: int, expected: list[list[int]]
) -> None:
    """The network is one weight that loses 1 in every step: its value is minus the number of the
    step.
    """
    clients = Clients.from_arrays([(np.ones((size, 1)), np.zeros(size))])
    problem = problem_of(linear(1), clients, GaussianRegression(noise=1.0))

    class Falling(GaussianRegression):
        def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
            return outputs.sum(-1)  # its gradient is the input, 1

    start = initial(problem.network, 1)
    start.theta.zero_()
    iterates = Iterates(start, False, [size], burn_in, segments)
    train(
        problem.network,
        Falling(noise=1.0),
        start,
        clients,
        plan_of(1, batch, lr=1.0, momentum=0.0),
        RNG,
        beside=iterates,
    )
    found = [average.item() for average in iterates.averages(0)]
    assert found == pytest.approx(
        [-np.mean(steps) for steps in expected], rel=1e-14
    )  # a mean of whole numbers


def test_the_servers_step_by_hand() -> None:
    clients = labelled(9, 3)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedPA(update="full", server_lr=0.3, server_momentum=0.8)
    server = algorithm.start(problem, RNG)
    theta, head = server["theta"], server["head"]
    velocity, head_velocity = torch.zeros_like(theta), torch.zeros_like(head)
    for number in range(1, 4):
        answers = {
            key: server[key] + normal(2, len(server[key]), seed=number) for key in ("theta", "head")
        }
        found = answers | {"examples": clients.sizes.double()}
        received = algorithm.broadcast(server, [0, 1])
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, RNG), RNG
        )
        # Delta = theta - what was sent; sizes 9 and 3.
        velocity = (
            0.8 * velocity + theta - (0.75 * answers["theta"][0] + 0.25 * answers["theta"][1])
        )
        head_velocity = (
            0.8 * head_velocity + head - (0.75 * answers["head"][0] + 0.25 * answers["head"][1])
        )
        theta, head = theta - 0.3 * velocity, head - 0.3 * head_velocity
        # Numbers below ten, some sums in another order.
        torch.testing.assert_close(server["theta"], theta, rtol=0, atol=1e-13)
        torch.testing.assert_close(server["head"], head, rtol=0, atol=1e-13)


def test_a_delta_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(fedhb.DivergedError, match=r"round 1.*client \d.*'theta'"):
        trained(mlp(4, 5, 3).float(), FedPA(), lr=1e30)


def test_it_learns_digits() -> None:
    clients = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=4, seed=0
    )
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    settings = {
        "rounds": 8,
        "fraction": 0.5,
        "batch_size": 20,
        "personal_epochs": 2,
        "progress": False,
    }
    result = fedhb.fit(module, clients, FedPA(warm_up=1), **settings).result
    # Chance is 0.1. Seen: 0.8 and 0.9; the bounds leave room for other kernels, not for a broken
    # method.
    assert result["global"]["accuracy"] > 0.6 and result["personalised"]["accuracy"] > 0.6


def test_clients_with_too_few_steps_for_two_samples_are_told_that_it_is_fedavg() -> None:
    few = {"local_epochs": 1, "batch_size": 5, "lr": 0.1, "sizes": (9, 8, 10)}
    with pytest.warns(
        UserWarning,
        match="burn_in=0.8",
    ):
        sampled = trained(batch_normed(), FedPA(), **few)
    assert same_network(sampled, trained(batch_normed(), FedAvg(update="full"), **few))
