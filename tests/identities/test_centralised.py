"""Centralised training: FedAvg with one client, and the pooled optimum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    examples,
    labelled,
    linear,
    mlp,
    plan_of,
    problem_of,
    regression,
    same_bits,
)
from torch import Tensor

import fedhb
from fedhb.algorithms import FedAvg, Plan, Problem
from fedhb.algorithms.centralised import Centralised
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import SERVER, Randomness

SHUFFLES = ("client", "pooled")


SIZES, D, NOISE, LR = (8, 8, 8, 8), 3, 0.5, 0.2


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_one_client_is_fedavg(make: Any, update: str, shuffle: str) -> None:
    module, clients = make(), labelled(11)
    options = {
        "rounds": 3,
        "fraction": 1.0,
        "local_epochs": 2,
        "batch_size": 4,
        "seed": 2,
        "progress": False,
    }
    fedavg = fedhb.fit(module, clients, FedAvg(update=update), **options)
    run = fedhb.fit(module, clients, Centralised(update=update, shuffle=shuffle), **options)
    assert same_bits(run.state.server, fedavg.state.server)
    assert [(r["loss"], r["score"]) for r in run.records] == [
        (r["loss"], r["score"]) for r in fedavg.records
    ]
    x, y = clients.train.x[:6], clients.train.y[:6]
    assert np.array_equal(run.predict(x), fedavg.predict(x))
    assert np.array_equal(
        run.personalise(x, y, lr=0.1).predict(x), fedavg.personalise(x, y, lr=0.1).predict(x)
    )


def quadratic(spread: float = 1.0) -> tuple[Problem, Clients, Tensor, Tensor]:
    """Clients with different coefficients; the Hessians A [N, d, d] and minima w [N, d] of their
    mean losses.
    """
    clients = regression(*SIZES, inputs=D, spread=spread)
    pairs = [examples(clients, c) for c in range(len(SIZES))]
    A = torch.stack([x.T @ x / NOISE**2 / len(x) for x, _ in pairs])
    w = torch.stack([torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0] for x, y in pairs])
    return problem_of(linear(D), clients, GaussianRegression(noise=NOISE)), clients, A, w


def pooled_optimum(A: Tensor, w: Tensor) -> Tensor:
    """Of clients of equal size."""
    return torch.linalg.solve(A.sum(0), (A @ w.unsqueeze(2)).sum(0)[:, 0])


def rounds(algorithm: Any, problem: Problem, clients: Clients, plan: Plan, count: int) -> Tensor:
    """theta after some rounds with all clients."""
    server = algorithm.start(problem, RNG)
    for number in range(1, count + 1):
        rng = Randomness(0, number)
        received = algorithm.broadcast(server, clients.ids.tolist())
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, rng)
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
    return server["theta"]


def order_of(number: int) -> list[int]:
    """Return the order of the clients in a round."""
    return torch.randperm(len(SIZES), generator=Randomness(0, number)(SERVER, "turns")).tolist()


def test_pooled_training_reaches_the_optimum_that_fedavg_misses() -> None:
    problem, clients, A, w = quadratic()
    optimum = pooled_optimum(A, w)
    x, y = clients.train.x.double(), clients.train.y.double()
    lstsq = torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0]
    torch.testing.assert_close(
        optimum, lstsq, rtol=0, atol=1e-13
    )  # two exact ways, conditions below 100
    # All examples in one batch: gradient descent, which contracts by the largest |1 - lr
    # (eigenvalue)| < 0.6 in each of 60 steps.
    plan = plan_of(epochs=6, batch_size=32, lr=LR, momentum=0.0)
    assert (1 - LR * torch.linalg.eigvalsh(A.mean(0))).abs().max() < 0.6
    found = rounds(Centralised(shuffle="pooled"), problem, clients, plan, 10)
    torch.testing.assert_close(found, optimum, rtol=0, atol=1e-12)
    # FedAvg's clients have time to find their own optima (0.86^200 = 1e-13), whose mean is where it
    # stays.
    assert (1 - LR * torch.linalg.eigvalsh(A)).abs().max() < 0.86
    own = rounds(FedAvg(), problem, clients, replace(plan, epochs=200), 1)
    torch.testing.assert_close(own, w.mean(0), rtol=0, atol=1e-11)
    assert (own - optimum).norm() > 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epochs", [1, 3])
def test_clients_in_turn_by_hand(epochs: int, momentum: float) -> None:
    """tau steps on a client's whole data, then on the next one's, with a momentum that does not
    stop between them.
    """
    problem, clients, A, w = quadratic()
    lr = 0.02
    theta = problem.network.theta.clone()
    for number in (1, 2):
        velocity = torch.zeros_like(theta)
        for c in order_of(number):
            for _ in range(epochs):
                velocity = momentum * velocity + A[c] @ (theta - w[c])
                theta = theta - lr * velocity
    plan = plan_of(epochs=epochs, batch_size=8, lr=lr, momentum=momentum)
    found = rounds(Centralised(update="body", shuffle="client"), problem, clients, plan, 2)
    torch.testing.assert_close(
        found, theta, rtol=0, atol=1e-13
    )  # the same sums in another order, numbers below ten
    assert len({tuple(order_of(number)) for number in range(1, 9)}) > 4  # an order for every round


def test_clients_in_turn_approach_the_pooled_optimum_with_small_steps() -> None:
    problem, clients, A, w = quadratic()
    optimum, gaps = pooled_optimum(A, w), []
    for lr in (0.04, 0.01):
        plan = plan_of(epochs=1, batch_size=8, lr=lr, momentum=0.0)
        # 8 lr a round, 8 being four times the smallest eigenvalue of the mean: of the start exp(-8)
        # is left
        gaps.append(
            (
                rounds(
                    Centralised(update="body", shuffle="client"),
                    problem,
                    clients,
                    plan,
                    int(1 / lr),
                )
                - optimum
            )
            .norm()
            .item()
        )
    # The bias of incremental gradients goes with the step, here a quarter; the order of the last
    # rounds makes it more or less.
    assert gaps[1] < 0.5 * gaps[0] and gaps[1] < 0.05


def test_clients_in_turn_forget_all_but_the_last() -> None:
    """With many epochs, theta is the optimum of whoever came last: how the paper's centralised
    training fails.
    """
    problem, clients, _, w = quadratic()
    found = rounds(
        Centralised(update="body", shuffle="client"),
        problem,
        clients,
        plan_of(epochs=150, batch_size=8, lr=LR, momentum=0.0),
        1,
    )
    torch.testing.assert_close(found, w[order_of(1)[-1]], rtol=0, atol=1e-9)  # 0.86^150 = 1e-10
