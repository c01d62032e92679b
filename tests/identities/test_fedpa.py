"""FedPA: the dynamic programme against the explicit inverse, its special cases, its samples, and
posteriors with a known mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    TRAINING,
    batch_normed,
    examples,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    same_network,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Arrays, FedAvg, Plan, Problem
from fedhb.algorithms.fedpa import FedPA, posterior_point
from fedhb.algorithms.toolbox import start_weights
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import Randomness
from fedhb.training.sgd import train


def trained(
    module: nn.Module, algorithm: Any, sizes: tuple[int, ...] = (9, 6, 4, 7, 8), **options: Any
) -> Arrays:
    return fedhb.fit(module, labelled(*sizes), algorithm, **(TRAINING | options)).state.server


def explicit(theta: Tensor, samples: Tensor, rho: float) -> Tensor:
    """theta - Sigma^-1 (theta - mean) with the d x d matrix."""
    count, d = samples.shape
    mean, r = samples.mean(0), 1 / (1 + (count - 1) * rho)
    centred = samples - mean
    covariance = centred.T @ centred / max(count - 1, 1)
    sigma = r * torch.eye(d, dtype=torch.float64) + (1 - r) * covariance
    return theta - torch.linalg.solve(sigma, theta - mean)


@pytest.mark.parametrize("rho", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("d", [3, 6])
def test_the_programme_is_the_explicit_inverse(d: int, count: int, rho: float) -> None:
    for seed in range(5):
        theta, samples = (
            normal(d, seed=seed),
            normal(d, seed=50 + seed) + 1.5 * normal(count, d, seed=100 + seed),
        )
        before = samples.clone()
        point = posterior_point(theta, list(samples), rho)
        # Numbers up to 100 (Sigma^-1 is up to 1 + 8 rho), each after some dozens of roundings; the
        # solver has as many.
        torch.testing.assert_close(point, explicit(theta, samples, rho), rtol=1e-12, atol=1e-12)
        assert torch.equal(samples, before)
    if count > 2 and rho:  # the covariance matters in this comparison
        assert (point - samples.mean(0)).abs().max() > 1e-2


def test_without_a_covariance_the_delta_is_that_of_the_mean() -> None:
    """Equal samples: Sigma = r I, and the delta is 1 / r times the distance, as the estimator has
    it.
    """
    theta, x = normal(4, seed=1), normal(4, seed=2)
    torch.testing.assert_close(
        posterior_point(theta, [x, x, x], 0.5), theta + 2.0 * (x - theta), rtol=1e-15, atol=1e-15
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sample_is_the_sample_to_the_bit(dtype: torch.dtype) -> None:
    theta, x = normal(1000, seed=1).to(dtype), normal(1000, seed=2).to(dtype)
    assert torch.equal(posterior_point(theta, [x], 1.0), x)


@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_one_sample_and_warm_up_are_fedavg_to_the_bit(make, update: str) -> None:
    module = make()
    fedavg = trained(module, FedAvg(update=update))
    assert same_network(trained(module, FedPA(update=update, local_samples=1)), fedavg)
    assert same_network(trained(module, FedPA(update=update, warm_up=3)), fedavg)
    assert not same_network(trained(module, FedPA(update=update, warm_up=2, burn_in=0.5)), fedavg)
    # Clients with one batch in one epoch have one iterate: they are asked for four samples, and
    # have one.
    short = {"batch_size": 9, "local_epochs": 1}
    assert same_network(
        trained(module, FedPA(update=update), **short),
        trained(module, FedAvg(update=update), **short),
    )
    # The server's step is the other half of it.
    assert not same_network(
        trained(module, FedPA(update=update, local_samples=1, server_lr=0.9)), fedavg
    )
    assert not same_network(
        trained(module, FedPA(update=update, local_samples=1, server_momentum=0.1)), fedavg
    )


def test_personalisation_is_fedavgs() -> None:
    clients, plan = labelled(9, 6, 5), plan_of(epochs=2, train_head=True)
    problem = problem_of(mlp(4, 5, 3), clients)
    mine, theirs = (
        algorithm.personalise(
            problem, algorithm.start(problem, RNG), clients, {}, plan, RNG
        ).arrays()
        for algorithm in (FedPA(), FedAvg(update="body"))
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert (mine["head"][:, 0] - problem.network.head).abs().amax(1).min() > 1e-3


SEGMENTS = {  # three after a quarter of the training: the steps of clients with 6, 19 and 12 examples, batches of 4, two epochs
    0: [
        [1, 2],
        [3, 4],
    ],  # 4, 6, 10 and 12 of 12 examples seen: bounds at 3, 6, 9, 12, and one segment without a step
    1: [
        [3, 4, 5],
        [6, 7],
        [8, 9, 10],
    ],  # 4, 8, 12, 16, 19 of 38, and 19 more: bounds at 9.5, 19, 28.5, 38
    2: [[2, 3], [4], [5, 6]],  # bounds at 6, 12, 18, 24
}


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_what_ragged_clients_send_is_the_explicit_estimate_of_their_iterates(
    make, update: str
) -> None:
    """All clients together, against each client alone with its iterates written down one by one."""
    clients, algorithm = (
        labelled(6, 19, 12),
        FedPA(update=update, rho=0.7, local_samples=3, burn_in=0.25),
    )
    problem, plan = problem_of(make(), clients), plan_of(epochs=2, train_head=update == "full")
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, [0, 1, 2])
    found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
    sent = torch.cat([received[key] for key in ("theta", "head") if key in received])
    for c, segments in SEGMENTS.items():
        iterates: list[Tensor] = []
        start = start_weights(problem, received["theta"], received, 1)

        def note(batch: Any, m: Tensor, start=start, iterates=iterates) -> None:
            iterates.append(torch.cat([start.theta[0], start.head[0]])[: len(sent)])

        weights, _ = train(
            problem.network, problem.likelihood, start, clients.select([c]), plan, RNG, beside=note
        )
        samples = torch.stack(
            [torch.stack([iterates[s - 1] for s in steps]).mean(0) for steps in segments]
        )
        answer = torch.cat([found[key][c] for key in ("theta", "head") if key in found])
        # Batched products and averages in another order, over ten steps, then a solve with a matrix
        # that is well conditioned.
        torch.testing.assert_close(answer, explicit(sent, samples, 0.7), rtol=0, atol=1e-12)
        assert (answer - iterates[-1]).abs().max() > 1e-2  # not what FedAvg would send
        if "buffers" in found:
            torch.testing.assert_close(found["buffers"][c], weights.buffers[0], rtol=0, atol=1e-13)


def skewed(seed: int, pairs: int, size: int, distance: float, noise: float) -> Clients:
    """Clients of two kinds, each sure of one of two weights (3/4 of its examples) and not of the
    other, and disagreeing.
    """
    random = np.random.default_rng(seed)
    found = []
    for sure, weights in ((0, (distance, 0.0)), (1, (0.0, distance))) * pairs:
        x = np.zeros((size, 2))
        x[: 3 * size // 4, sure] = 1.0
        x[3 * size // 4 :, 1 - sure] = 1.0
        found.append((x, x @ np.array(weights) + noise * random.normal(size=size)))
    return Clients.from_arrays(found)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve(x.T @ x, x.T @ y)


def pooled(clients: Clients) -> Tensor:
    """The mode of the global posterior under a flat prior."""
    return least_squares(clients.train.x.double(), clients.train.y.double())


def rounds(algorithm: Any, problem: Problem, clients: Clients, plan: Plan, count: int) -> Tensor:
    server = algorithm.start(problem, RNG)
    for number in range(1, count + 1):
        rng = Randomness(0, number)
        received = algorithm.broadcast(server, clients.ids.tolist())
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, rng)
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
    return server["theta"]


def test_from_exact_samples_it_finds_the_exact_global_mode() -> None:
    """2 d samples with the moments of the client's own posterior: Sigma is its covariance, up to a
    factor that all share.
    """
    clients = skewed(seed=0, pairs=1, size=40, distance=2.0, noise=0.5)
    problem = problem_of(linear(2), clients, GaussianRegression(noise=0.5))
    rho, count, scale = 0.5, 4, 200.0
    r = 1 / (1 + (count - 1) * rho)
    optima, samples = [], []
    for c in range(2):
        x, y = examples(clients, c)
        optima.append(least_squares(x, y))
        values, directions = torch.linalg.eigh(
            scale * 0.25 * torch.linalg.inv(x.T @ x)
        )  # of scale times the posterior covariance
        # r + (1 - r) 2 s^2 / (count - 1) = value, along each direction
        steps = (((values - r) / (1 - r)) * (count - 1) / 2).sqrt() * directions
        samples.append([optima[c] + sign * steps[:, j] for j in range(2) for sign in (1.0, -1.0)])
    algorithm = FedPA(rho=rho, server_lr=1.0)
    server = algorithm.start(problem, RNG)
    for _ in range(60):
        answers = torch.stack([posterior_point(server["theta"], samples[c], rho) for c in range(2)])
        received = algorithm.broadcast(server, [0, 1])
        found = {"theta": answers, "examples": clients.sizes.double()}
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, RNG), RNG
        )
    mode = pooled(clients)
    # Each step shrinks the distance by 1 - (sum of the precisions)/2 = 0.6 in either weight: 60 of
    # them by 1e-13.
    torch.testing.assert_close(server["theta"], mode, rtol=0, atol=1e-11)
    assert (torch.stack(optima).mean(0) - mode).norm() > 0.5  # where FedAvg ends


def test_with_its_own_samples_it_comes_nearer_to_the_mode_than_fedavg() -> None:
    """SGD on single examples: FedAvg averages the clients' optima, FedPA weighs them by what each
    client is sure of.
    """
    clients = skewed(seed=0, pairs=8, size=360, distance=20.0, noise=6.0)
    problem = problem_of(linear(2), clients, GaussianRegression(noise=1.0))
    plan = plan_of(epochs=1, batch_size=1, lr=0.5, momentum=0.0)
    mode = pooled(clients)  # near (15, 15)
    fedavg = rounds(FedAvg(update="body"), problem, clients, plan, 1)
    fedpa = rounds(FedPA(rho=1.0, local_samples=12, burn_in=0.2), problem, clients, plan, 5)
    # FedAvg ends near (10, 10), at 7. FedPA's error is that of twelve correlated samples: 0.4 to 2
    # over six seeds of the data.
    assert (fedavg - mode).norm() > 5.0
    assert (fedpa - mode).norm() < 0.5 * (fedavg - mode).norm()
