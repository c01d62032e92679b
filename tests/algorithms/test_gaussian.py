"""What both Gaussian families share: the KL, the sums, and draws of clients' weights."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, niw, normal, vector_problem

from fedhb.algorithms import EmpiricalBayes, toolbox
from fedhb.algorithms.gaussian import Gaussian

D = 7
FAMILIES = {
    "full": niw(p_do=0.9),
    "per coordinate": niw(dof="per_coordinate"),
    "learned": EmpiricalBayes(update="body", p_do=0.9),
}


def server_of(algorithm: Gaussian) -> tuple:
    problem = vector_problem(D, num_clients=4, num_examples=30)
    server = algorithm.start(problem, RNG)
    V0 = server["V0"] * normal(*server["V0"].shape, seed=3).exp()
    return problem, server | {"m0": normal(D, seed=4), "V0": V0}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kl_is_quadratic_in_the_prior_precision(name, monkeypatch) -> None:
    algorithm = FAMILIES[name]
    problem, server = server_of(algorithm)
    m = normal(5, D, seed=1)
    precision = algorithm.prior_precision(problem, server)
    expected = 0.5 * ((m - server["m0"]).square() * precision).sum(1)
    torch.testing.assert_close(algorithm.kl(problem, server, m), expected, rtol=1e-13, atol=0)
    monkeypatch.setattr(toolbox, "BLOCK_NUMBERS", 10)  # two weights of five clients at a time
    torch.testing.assert_close(algorithm.kl(problem, server, m), expected, rtol=1e-13, atol=0)
    assert torch.equal(algorithm.centre(server), server["m0"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pull_has_the_prior_precision(name) -> None:
    """mu (m - target) is the slope of the KL, divided by the number of examples."""
    algorithm = FAMILIES[name]
    problem, server = server_of(algorithm)
    sizes = torch.tensor([3, 10])
    pull = algorithm.pull(problem, server, sizes)
    precision = algorithm.prior_precision(problem, server) / sizes.unsqueeze(1)
    torch.testing.assert_close(pull.mu.expand(2, D), precision, rtol=1e-13, atol=0)
    assert torch.equal(pull.target, server["m0"])


def test_sums_are_of_differences_and_their_squares() -> None:
    algorithm = FAMILIES["full"]
    problem, server = server_of(algorithm)
    m = normal(5, D, seed=1)
    answers = {"m": m, "examples": torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])}
    sums = algorithm.summarise(problem, server, answers, RNG)
    gaps = m - server["m0"]
    torch.testing.assert_close(sums["m"], gaps.sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(sums["squares"], gaps.square().sum(0), rtol=1e-14, atol=0)
    assert sums["count"] == 5 and sums["examples"] == 14


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_those_of_the_predictive(name) -> None:
    algorithm = FAMILIES[name]
    problem, server = server_of(algorithm)
    draws = algorithm.sample(problem, server, 3, torch.Generator().manual_seed(5))
    predictive = algorithm.posterior(problem, server).predictive()
    again = predictive.sample(3, torch.Generator().manual_seed(5))
    assert draws.shape == (3, D) and torch.equal(draws, again)
