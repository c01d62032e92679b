"""NIW: its first prior, its samples and its predictions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import (
    RNG,
    aggregate,
    generator,
    labelled,
    mlp,
    niw,
    normal,
    problem_of,
    vector_problem,
)
from torch import Tensor

import fedhb
from fedhb.algorithms import NIW, Problem
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER

N, D, EXAMPLES = 7, 5, 40  # clients, weights, training examples of all clients


DOFS = ["full", "per_coordinate"]


def server_problem() -> Problem:
    return vector_problem(D, num_clients=N, num_examples=EXAMPLES)


def dimension(dof: str) -> int:
    return D if dof == "full" else 1


scales = st.floats(-6, 6).map(lambda power: 10.0**power)


@settings(derandomize=True, deadline=None, max_examples=100)
@example(
    1e-6, 1e6, 1.0, 1e-6, 1.0, 0.0, 3, "full", torch.float64
)  # the scatter is all rounding, of either sign
@given(
    spread=scales,
    place=scales,
    before=scales,
    prior_scale=scales,
    p_do=st.floats(0, 1),
    lambda0=st.one_of(st.just(0.0), scales),
    cohort=st.integers(1, N),
    dof=st.sampled_from(DOFS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_V0_is_positive(
    spread, place, before, prior_scale, p_do, lambda0, cohort, dof, dtype
) -> None:
    problem = server_problem()
    algorithm = niw(dof=dof, p_do=p_do, lambda0=lambda0, prior_scale=prior_scale, eps=0.0)
    m = (place * normal(D, seed=4) + spread * normal(cohort, D, seed=5)).to(dtype)
    server = {"m0": (before * normal(D, seed=6)).to(dtype), "V0": torch.ones(D, dtype=dtype)}
    V0 = aggregate(algorithm, problem, server, m)["V0"]
    dim = dimension(dof)
    least = (EXAMPLES + dim + 2) / (N + dim + 2) * prior_scale**2
    assert (
        torch.isfinite(V0).all() and (least * (1 - 1e-6) <= V0).all()
    )  # 1e-6: float32 rounds V0 and `least` apart


def test_the_first_V0_is_that_of_clients_at_the_initial_network() -> None:
    problem = server_problem()
    algorithm = niw(p_do=0.9, lambda0=2.0, prior_scale=0.3, eps=0.05)
    server, m0 = algorithm.start(problem, RNG), problem.network.theta
    assert torch.equal(server["m0"], m0)
    inner = 0.3**2 + N * 0.05**2 + 2.0 * m0.square() + N * (1 - 0.9) * m0.square()
    torch.testing.assert_close(
        server["V0"], (EXAMPLES + D + 2) / (N + D + 2) * inner, rtol=1e-14, atol=0
    )
    # As printed (Sigma_0 = I, lambda0 = 1), without dropout: n0 / (N + d + 2) (1 + N eps^2 + m0^2).
    printed = niw(p_do=1.0, eps=0.05).start(problem, RNG)["V0"]
    torch.testing.assert_close(
        printed,
        (EXAMPLES + D + 2) / (N + D + 2) * (1 + N * 0.05**2 + m0.square()),
        rtol=1e-14,
        atol=0,
    )


@pytest.mark.parametrize("dof", DOFS)
def test_samples_have_the_moments_of_the_students_t(dof: str) -> None:
    problem = vector_problem(D, num_clients=N, num_examples=9)
    algorithm = niw(dof=dof, lambda0=2.0)
    server = {"m0": normal(D, seed=7), "V0": normal(D, seed=8).exp()}
    draws = algorithm.sample(problem, server, 100_000, generator(0))
    l0, nu = 9 + 2.0, 9 + 3.0  # nu = n0 - dim + 1 = |D| + 3, whatever the dimension
    scale = (l0 + 1) * server["V0"] / (l0 * nu)
    predictive = algorithm.posterior(problem, server).predictive()
    assert predictive.nu == nu
    torch.testing.assert_close(predictive.scale, scale, rtol=1e-14, atol=0)
    variance = nu / (nu - 2) * scale
    centred = draws - server["m0"]
    # Five standard errors; nu = 12 has the fourth moment they need. An error of 5 percent in the
    # variance is 9 of them.
    error = centred.std(0) / math.sqrt(len(draws))
    assert (centred.mean(0).abs() < 5 * error).all()
    error = centred.square().std(0) / math.sqrt(len(draws))
    assert (5 * error < 0.03 * variance).all()
    assert ((centred.square().mean(0) - variance).abs() < 5 * error).all()


def test_prediction_averages_the_probabilities_of_sampled_networks() -> None:
    clients = labelled(9, 6)
    module = mlp(4, 5, 3)
    problem, x = problem_of(module, clients), normal(6, 4, seed=2)
    algorithm = niw(num_samples=3, prior_scale=0.5)
    server = algorithm.start(problem, RNG)

    def by_hand(theta: Tensor) -> Tensor:
        weights = Weights(
            theta.unsqueeze(0),
            problem.network.head.unsqueeze(0),
            problem.network.buffers.unsqueeze(0),
        )
        return problem.network.outputs(weights, x.unsqueeze(0))[0].softmax(-1)

    draws = algorithm.sample(problem, server, 3, RNG(SERVER, "predict"))
    expected = torch.stack([by_hand(theta) for theta in draws]).mean(0)
    # Batched products and a mean of three, rounded in another order.
    torch.testing.assert_close(
        algorithm.predict(problem, server, x, RNG), expected, rtol=0, atol=1e-14
    )
    assert (expected - by_hand(server["m0"])).abs().max() > 0.01
    at_m0 = dataclasses.replace(algorithm, num_samples=0).predict(problem, server, x, RNG)
    torch.testing.assert_close(
        at_m0, module(x).softmax(-1).detach(), rtol=0, atol=1e-14
    )  # m0 is the initial network


def test_the_printed_constants_are_keywords_of_fit() -> None:
    printed = NIW.as_printed()
    algorithm = printed.pop("algorithm")
    assert algorithm == NIW(kl_weight=1.0, lambda0=1.0, num_samples=1, p_do=0.999, eps=1e-4)
    assert algorithm.update == "body" and algorithm.dof == "full"
    assert printed == {
        "lr": 0.1,
        "momentum": 0.9,
        "batch_size": 50,
        "personal_lr": 1e-3,
        "personal_epochs": 5,
    }
    options = {"rounds": 1, "fraction": 1.0, "progress": False}
    run = fedhb.fit(mlp(4, 5, 3), labelled(9, 6), algorithm, **printed, **options)
    assert run.personal_plan.epochs == 5 and run.records[0]["lr"] == 0.1


def test_a_report_shows_the_deviation_of_each_tensor() -> None:
    problem = server_problem()
    algorithm = niw()
    n0 = algorithm.n0(problem)
    assert n0 == EXAMPLES + D + 2
    server = {"V0": n0 * torch.tensor([0.04, 0.01, 0.09, 0.01, 0.1], dtype=torch.float64)}
    assert algorithm.describe(problem, server)["prior_deviation"] == pytest.approx([0.05**0.5])
