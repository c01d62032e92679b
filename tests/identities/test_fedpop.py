"""FedPop: the chain samples the exact posterior of the head; with heads at their mean it is FedAvg."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    examples,
    initial,
    labelled,
    mlp,
    plan_of,
    problem_of,
    regression,
    seeded,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import FedAvg, Problem
from fedhb.algorithms.fedpop import FedPop
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression

NOISE, PRIOR = 0.6, 0.5


def two_layers() -> nn.Module:
    """A linear body of nine weights, and a head z of three: the loss is quadratic in z."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)))


def posterior(problem: Problem, clients: Clients, c: int) -> tuple[Tensor, Tensor]:
    """Mean [3] and covariance [3, 3] of the head given client c's data, around the initial head,
    the body fixed.
    """
    x, y = examples(clients, c)
    features = x @ problem.network.theta.view(3, 3).T
    identity = torch.eye(3, dtype=torch.float64)
    precision = features.T @ features / NOISE**2 + identity / PRIOR**2
    mean = torch.linalg.solve(
        precision, features.T @ y / NOISE**2 + problem.network.head / PRIOR**2
    )
    return mean, torch.linalg.inv(precision)


def linear_gaussian(clients: Clients) -> Problem:
    return problem_of(two_layers(), clients, GaussianRegression(noise=NOISE))


def test_without_noise_the_chain_ends_at_the_mode_of_every_client() -> None:
    """Clients of different sizes: the data count by their number against the prior."""
    clients = regression(8, 3, 5)
    problem = linear_gaussian(clients)
    algorithm = FedPop(prior_scale=PRIOR, noise=0.0, head_epochs=250, num_heads=1, burn_in=1.0)
    heads = algorithm.chain(
        problem,
        initial(problem.network, 3),
        problem.network.head,
        clients,
        plan_of(batch_size=8, lr=0.3),
        RNG,
    )
    for c in range(3):
        # Curvatures per example above 0.5: 250 steps of 0.3 leave e^-37 of the way.
        torch.testing.assert_close(
            heads[c, 0], posterior(problem, clients, c)[0], rtol=0, atol=1e-11
        )
    assert (heads[:, 0] - problem.network.head).abs().amax(1).min() > 0.1


def test_the_chain_samples_the_exact_posterior() -> None:
    """Many chains on the same ten examples: mean and covariance of the kept heads, which are
    zero-width without the noise.
    """
    x, y = examples(regression(10, seed=4), 0)
    chains, kept = 250, 8
    clients = Clients.from_arrays([(x.numpy(), y.numpy())] * chains)
    problem = linear_gaussian(clients)
    mean, covariance = posterior(problem, clients, 0)
    lr = 0.06
    # Steps of the chain, in which the exact posterior's slowest direction forgets 1 - rate, and its
    # fastest is well resolved.
    rates = lr / 10 / torch.linalg.eigvalsh(covariance)
    assert rates.max() < 0.16 and (1 - rates.min()) ** 150 < 0.02
    algorithm = FedPop(prior_scale=PRIOR, head_epochs=300, num_heads=kept)
    heads = algorithm.chain(
        problem,
        initial(problem.network, chains),
        problem.network.head,
        clients,
        plan_of(batch_size=10, lr=lr),
        RNG,
    )
    assert heads.shape == (chains, kept, 3)
    centred = heads - mean
    # Five standard errors over the chains, which are independent; of the way from the start less
    # than two percent are left, and a finite step changes a variance by the share rate / 2.
    error = centred.mean(1).std(0) / math.sqrt(chains)
    assert (5 * error < 0.25 * covariance.diagonal().sqrt()).all()
    assert (centred.mean((0, 1)).abs() < 5 * error + 0.02 * covariance.diagonal().sqrt()).all()
    products = torch.einsum("cmi,cmj->cij", centred, centred) / kept
    error = products.std(0) / math.sqrt(chains)
    bias = float(rates.max()) / 2 * covariance.diagonal().max()
    assert (5 * error.diagonal() < 0.25 * covariance.diagonal()).all()
    assert ((products.mean(0) - covariance).abs() < 5 * error + bias).all()
    assert (
        5 * error.diagonal() + bias < 0.4 * covariance.diagonal()
    ).all()  # a factor of two in the noise would be seen


def test_the_noise_has_the_size_it_should() -> None:
    """One step from the prior's mean, without data that matter: z - mu_z is noise of variance 2 lr
    / |D_i|.
    """
    clients = Clients.from_arrays([(np.zeros((5, 3)), np.zeros(5))] * 600)
    problem, lr = linear_gaussian(clients), 0.01
    for noise in (1.0, 0.5):
        algorithm = FedPop(prior_scale=1e3, noise=noise, head_epochs=1, num_heads=1)
        start = initial(problem.network, 600)
        heads = algorithm.chain(
            problem, start, problem.network.head, clients, plan_of(batch_size=5, lr=lr), RNG
        )
        deviation = (heads[:, 0] - problem.network.head).std().item()
        # 1800 numbers: five standard errors of a standard deviation are 8 percent.
        assert deviation == pytest.approx(noise * math.sqrt(2 * lr / 5), rel=0.083)
        assert torch.equal(start.head, initial(problem.network, 600).head)


@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_with_heads_pinned_to_the_mean_it_is_fedavg_of_the_body(make) -> None:
    module, clients = make(), labelled(9, 6, 4, 7, 8)
    options = {
        "rounds": 3,
        "fraction": 0.6,
        "local_epochs": 2,
        "batch_size": 4,
        "seed": 2,
        "progress": False,
    }
    pinned = fedhb.fit(
        module, clients, FedPop(update="body", prior_scale=1e-9), **options
    ).state.server
    fedavg = fedhb.fit(module, clients, FedAvg(update="body"), **options).state.server
    assert pinned.keys() == fedavg.keys()
    for key in fedavg:
        # The heads deviate by 1e-9 or less.
        torch.testing.assert_close(pinned[key], fedavg[key], rtol=0, atol=1e-6)
    free = fedhb.fit(
        module, clients, FedPop(update="body", prior_scale=0.1), **options
    ).state.server
    assert (free["theta"] - fedavg["theta"]).abs().max() > 1e-2
