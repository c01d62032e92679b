"""Mixture: one prototype is FedProx, several are EM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    aggregate,
    labelled,
    mixture,
    mlp,
    normal,
    plan_of,
    problem_of,
)
from scattered_clients import SIGMA2, D, K, N, c_by_hand, scattered, server_of, server_problem
from torch import Tensor

from fedhb.algorithms import FedProx, objectives


def test_one_prototype_is_fedprox_on_the_clients() -> None:
    clients = labelled(9, 6, 3)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of(epochs=3)
    algorithm = mixture(num_prototypes=1, sigma2=0.05)
    server = algorithm.start(problem, RNG)
    assert torch.equal(server["r"], problem.network.theta.unsqueeze(0))
    found, _ = algorithm.local_update(
        problem, algorithm.broadcast(server, [0, 1, 2]), clients, {}, plan, RNG
    )
    for c, size in enumerate(clients.sizes.tolist()):
        fedprox = FedProx(mu=1 / (0.05 * size), update="body")
        alone, _ = fedprox.local_update(
            problem, {"theta": server["r"][0]}, clients.select([c]), {}, plan, RNG
        )
        # The strength and the batched products are rounded in another order, at nine steps or
        # fewer.
        torch.testing.assert_close(found["m"][c], alone["theta"][0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_one_prototype_is_a_shrunk_mean_on_the_server(chunk: int | None) -> None:
    problem, m = server_problem(), scattered()
    algorithm = mixture(num_prototypes=1, sigma2=SIGMA2)
    # A sum of nine numbers near one, taken from zero or from the old r.
    everyone = aggregate(algorithm, problem, server_of(normal(1, D)), m, chunk)["r"][0]
    torch.testing.assert_close(everyone, m.sum(0) / (N + SIGMA2), rtol=0, atol=1e-14)
    cohort = aggregate(algorithm, problem, server_of(normal(1, D)), m[:4], chunk)["r"][0]
    torch.testing.assert_close(cohort, m[:4].mean(0) / (SIGMA2 / N + 1), rtol=0, atol=1e-14)
    plain = mixture(num_prototypes=1, sigma2=SIGMA2, shrink=False)
    torch.testing.assert_close(
        aggregate(plain, problem, server_of(normal(1, D)), m, chunk)["r"][0],
        m.mean(0),
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("cohort", [N, 5])
def test_em_lowers_the_objective_to_a_stationary_point(cohort: int, shrink: bool) -> None:
    problem, m = server_problem(), scattered(cohort)
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2, shrink=shrink)
    server = server_of(normal(K, D, seed=3))
    values = [objectives.server_objective(algorithm, problem, server, m).item()]
    for _ in range(200):
        server = aggregate(algorithm, problem, server, m)
        values.append(objectives.server_objective(algorithm, problem, server, m).item())
    falls = -np.diff(values)
    assert (
        falls >= -1e-13
    ).all()  # at the end the value only rounds: some units in the last place of numbers near ten
    assert falls[:5].min() > 1e-3
    r = server["r"].requires_grad_()
    (gradient,) = torch.autograd.grad(
        objectives.server_objective(algorithm, problem, {"r": r}, m), r
    )
    # Sums of N (m - r) / sigma2, which are near ten, to some roundings; EM has converged linearly
    # by then.
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("cohort", [N, 5])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_the_m_step_minimises_jensens_bound(cohort: int, chunk: int | None) -> None:
    problem, m = server_problem(), scattered(cohort)
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2)
    before = normal(K, D, seed=3)
    c = c_by_hand(m, before)

    def bound(r: Tensor) -> Tensor:
        """1/2 sum_j ||r_j||^2 + N/N_f sum_ij c(j|i) (||m_i - r_j||^2 / (2 sigma2) + log c(j|i) K),
        eq:mix_server.
        """
        distances = (m.unsqueeze(1) - r).square().sum(-1)
        return (
            0.5 * r.square().sum()
            + N / cohort * (c * (distances / (2 * SIGMA2) + (c * K).log())).sum()
        )

    after = aggregate(algorithm, problem, server_of(before), m, chunk)["r"].requires_grad_()
    (gradient,) = torch.autograd.grad(bound(after), after)
    assert gradient.abs().max() < 1e-13  # sums of nine terms near one
    # It bounds the objective, and touches it where it was made.
    objective = objectives.server_objective(algorithm, problem, {"r": before}, m)
    assert bound(before).item() == pytest.approx(objective.item(), rel=1e-14)
    for seed in range(20):
        elsewhere = before + normal(K, D, seed=10 + seed)
        assert bound(elsewhere) > objectives.server_objective(
            algorithm, problem, {"r": elsewhere}, m
        )


def test_prototypes_have_no_order() -> None:
    problem, m, order = server_problem(), scattered(), torch.tensor([2, 0, 1])
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2)
    r = normal(K, D, seed=3)
    one, other = (
        aggregate(algorithm, problem, server_of(r[j]), m) for j in (torch.arange(K), order)
    )
    # Softmax and mean of three, summed in another order.
    torch.testing.assert_close(other["r"], one["r"][order], rtol=0, atol=1e-14)
    for function in (algorithm.kl, algorithm.expected_log_prior):
        torch.testing.assert_close(
            function(problem, {"r": r}, m),
            function(problem, {"r": r[order]}, m),
            rtol=1e-14,
            atol=0,
        )

    clients = labelled(9, 6, 3)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of(epochs=2)
    received = algorithm.broadcast(algorithm.start(problem, RNG), [0, 1, 2])
    shuffled = received | {"r": received["r"][order]}
    found, again = (
        algorithm.local_update(problem, given, clients, {}, plan, RNG)[0]["m"]
        for given in (received, shuffled)
    )
    torch.testing.assert_close(found, again, rtol=0, atol=1e-13)


def test_small_sigma2_assigns_each_client_to_its_nearest_prototype() -> None:
    problem, m = server_problem(), scattered()
    r = m[:K] + 0.1 * normal(K, D, seed=3)
    nearest = torch.cdist(m, r).argmin(1)
    assert sorted(nearest.bincount(minlength=K).tolist()) == [1, 3, 5]
    after = aggregate(mixture(num_prototypes=K, sigma2=1e-10), problem, server_of(r), m)["r"]
    kmeans = torch.stack([m[nearest == j].mean(0) for j in range(K)])
    torch.testing.assert_close(
        after, kmeans, rtol=0, atol=1e-9
    )  # what is left is the shrinkage, sigma2 over two clients


def test_the_pull_is_the_gradient_of_the_kl() -> None:
    problem, m = server_problem(), scattered(4).requires_grad_()
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2, kl_weight=0.3)
    received, sizes = {"r": normal(K, D, seed=3)}, torch.tensor([3, 10, 27, 5])
    (gradient,) = torch.autograd.grad(0.3 * algorithm.kl(problem, received, m).sum(), m)
    pull = algorithm.pull(problem, received, sizes)
    with torch.no_grad():
        by_pull = pull.mu * (m - pull.towards(m))
        by_hand = 0.3 / SIGMA2 * (m - c_by_hand(m, received["r"]) @ received["r"])
    # A softmax of three and sums of four numbers near one.
    torch.testing.assert_close(by_pull, gradient / sizes.unsqueeze(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient, by_hand, rtol=0, atol=1e-14)
    log_density = (
        algorithm.kl(problem, received, m)
        + torch.stack([-0.5 * (m - r_j).square().sum(1) / SIGMA2 for r_j in received["r"]])
        .exp()
        .sum(0)
        .log()
    )
    torch.testing.assert_close(
        log_density, torch.full_like(log_density, math.log(K)), rtol=1e-13, atol=0
    )
