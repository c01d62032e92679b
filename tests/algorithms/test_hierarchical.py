"""The general framework: the recorded objective."""

from __future__ import annotations

import pytest
from problems import (
    RNG,
    labelled,
    linear,
    mixture,
    mlp,
    niw,
    normal,
    plan_of,
    problem_of,
    regression,
)

from fedhb.algorithms import Arrays, EmpiricalBayes, Hierarchical, Problem, objectives
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression

SIZES, D, NOISE = (8, 5, 12, 6), 3, 0.4


N = len(SIZES)


def linear_gaussian() -> tuple[Problem, Clients]:
    clients = regression(*SIZES, inputs=D)
    return problem_of(linear(D), clients, GaussianRegression(noise=NOISE)), clients


RECORDED = {
    "niw": niw(precision="mean", p_do=0.9),
    "niw, per coordinate": niw(precision="mean", p_do=0.9, dof="per_coordinate"),
    "niw, tempered": niw(precision="mean", p_do=1.0, kl_weight=0.3),
    "empirical-bayes": EmpiricalBayes(update="body", lambda0=0.5),
    "mixture": mixture(num_prototypes=3, sigma2=0.7),
}


def any_server(algorithm: Hierarchical, problem: Problem, seed: int) -> Arrays:
    """A state that no round has led to."""
    server = algorithm.start(problem, RNG)
    wide = {"m0": 1.0, "V0": 0.0, "r": 1.0}
    found = {
        key: normal(*server[key].shape, seed=seed + k)
        for k, key in enumerate(wide)
        if key in server
    }
    if "V0" in server:
        found["V0"] = server["V0"] * (1.0 + found["V0"].square())
    if "evidence" in server:
        found["evidence"] = 1.0 + normal(*server["evidence"].shape, seed=seed + 7).square()
    return server | found


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_objective_is_the_negative_elbo(name: str) -> None:
    """Up to one constant for all states and answers, from the sums over all clients, and from those
    over some of them.
    """
    algorithm = RECORDED[name]
    problem, clients = linear_gaussian()
    if name == "mixture":  # whose gate needs a head
        clients = labelled(*SIZES)
        problem = problem_of(mlp(4, 5, 3), clients)
    constants = []
    for seed in range(4):
        server = any_server(algorithm, problem, 10 * seed)
        m = normal(N, problem.network.num_params, seed=seed)
        received = algorithm.broadcast(server, range(N))
        found, _ = algorithm.local_update(
            problem, received, clients, {}, plan_of(), RNG
        )  # the keys of an answer
        found |= {
            "m": m,
            "loss": objectives.expected_loss(algorithm, problem, received, clients, m)
            / clients.sizes,
        }
        found |= algorithm.reports(problem, received, m)
        recorded = algorithm.report(
            problem, server, algorithm.summarise(problem, received, found, RNG)
        )
        constants.append(
            recorded["negative_elbo"]
            - objectives.negative_elbo(algorithm, problem, server, clients, m).item()
        )
        part = {key: value[:2] for key, value in found.items()}
        half = algorithm.report(problem, server, algorithm.summarise(problem, received, part, RNG))[
            "negative_elbo"
        ]
        alike = objectives.negative_elbo(
            algorithm, problem, server, clients.select([0, 1]), m[:2]
        ).item()
        constants.append(half - alike)
    assert constants == pytest.approx([constants[0]] * len(constants), abs=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [niw(dof="full"), niw(dof="per_coordinate"), EmpiricalBayes(update="body", lambda0=1.0)],
)
def test_the_objectives_are_there_in_single_precision(algorithm: Hierarchical) -> None:
    """As runs have them: the same numbers as in double precision, to rounding."""
    values = []
    for module in (linear(D), linear(D).float()):
        clients = regression(*SIZES, inputs=D)
        problem = problem_of(module, clients, GaussianRegression(noise=NOISE))
        server, m = algorithm.start(problem, RNG), normal(N, D, seed=3).to(problem.network.dtype)
        values.append([
            *objectives.client_objective(algorithm, problem, server, clients, m).double().tolist(),
            float(objectives.server_objective(algorithm, problem, server, m)),
            float(objectives.negative_elbo(algorithm, problem, server, clients, m)),
        ])  # fmt: skip
    assert values[1] == pytest.approx(values[0], rel=1e-5)
