"""The objectives as functions: their parts, their cohorts, and what a round records."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, examples, labelled, mixture, mlp, niw, normal, plan_of, problem_of
from torch.nn import functional

from fedhb.algorithms import EmpiricalBayes, Hierarchical, objectives

FAMILIES = {
    "niw": niw(kl_weight=0.3, p_do=0.9),
    "mixture": mixture(num_prototypes=2, sigma2=0.7, kl_weight=0.3),
    "empirical-bayes": EmpiricalBayes(update="body", kl_weight=0.3),
}


def test_the_expected_loss_is_that_of_all_training_examples() -> None:
    clients, module = labelled(9, 4), mlp(4, 5, 3)
    problem, algorithm = problem_of(module, clients), niw()
    m = problem.network.theta + 0.3 * normal(2, problem.network.num_params, seed=1)
    found = objectives.expected_loss(algorithm, problem, algorithm.start(problem, RNG), clients, m)
    for c in range(2):
        x, y = examples(clients, c)
        hidden = torch.tanh(x @ m[c, :20].view(5, 4).T + m[c, 20:])
        head = problem.network.head
        logits = hidden @ head[:15].view(3, 5).T + head[15:]
        expected = functional.cross_entropy(logits, y, reduction="sum")
        torch.testing.assert_close(found[c], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_objectives_are_sums_of_their_terms(name: str) -> None:
    """The clients' terms of a cohort stand for those of all clients."""
    algorithm: Hierarchical = FAMILIES[name]
    clients = labelled(9, 6, 4)
    problem = problem_of(mlp(4, 5, 3), clients, num_clients=12, num_examples=80)
    server = algorithm.start(problem, RNG)
    m = algorithm.centre(server) + 0.3 * normal(3, problem.network.num_params, seed=1)
    loss = objectives.expected_loss(algorithm, problem, server, clients, m)
    kl = algorithm.kl(problem, server, m)
    of_clients = objectives.client_objective(algorithm, problem, server, clients, m)
    torch.testing.assert_close(of_clients, loss + 0.3 * kl, rtol=1e-12, atol=0)
    L0 = objectives.server_objective(algorithm, problem, server, m)
    log_prior = algorithm.expected_log_prior(problem, server, m).sum()
    torch.testing.assert_close(L0, algorithm.global_kl(problem, server) - 4 * log_prior)
    elbo = objectives.negative_elbo(algorithm, problem, server, clients, m)
    torch.testing.assert_close(elbo, 4 * loss.sum() + 0.3 * L0, rtol=1e-12, atol=0)


def test_a_round_records_the_share_of_the_prior() -> None:
    clients = labelled(9, 6)
    problem, algorithm = problem_of(mlp(4, 5, 3), clients), niw(kl_weight=0.3)
    server = algorithm.start(problem, RNG)
    answers, _ = algorithm.local_update(problem, server, clients, {}, plan_of(epochs=3), RNG)
    summary = algorithm.summarise(problem, server, answers, RNG)
    record = objectives.of_round(algorithm, problem, server, summary)
    kl = 0.3 * algorithm.kl(problem, server, answers["m"])
    loss = answers["loss"].double() * clients.sizes
    assert record["kl"] == pytest.approx(kl.mean().item())
    assert record["penalty_share"] == pytest.approx((kl.sum() / (kl + loss).sum()).item())
    nothing = niw(kl_weight=0.0)
    summary["loss"] = torch.zeros(())
    assert objectives.of_round(nothing, problem, server, summary)["penalty_share"] == 0.0
