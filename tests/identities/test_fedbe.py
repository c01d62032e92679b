"""FedBE: its two posteriors against the clients one by one, where it is FedAvg, and distillation
with a known answer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fedbe_round import fitted, holding, one_round, with_inputs
from problems import (
    RNG,
    batch_normed,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    regression,
    same_network,
)
from torch import Tensor

from fedhb.algorithms import Arrays, FedAvg, Problem
from fedhb.algorithms.fedbe import FLOOR, FedBE, Soft
from fedhb.likelihood import Categorical, GaussianRegression
from fedhb.seeding import Randomness

SIZES = (9, 6, 4, 7, 8)


alone = pytest.mark.filterwarnings("ignore:.*fedbe.*server inputs")


@alone
@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_without_distillation_the_network_is_fedavgs_to_the_bit(
    make, update: str, posterior: str
) -> None:
    module, clients = make(), labelled(*SIZES)
    fedavg = fitted(module, clients, FedAvg(update=update)).state.server
    fedbe = FedBE(update=update, posterior=posterior, server_lr=1e-2)
    assert same_network(
        fitted(module, with_inputs(clients), replace(fedbe, distill_epochs=0)).state.server, fedavg
    )
    assert same_network(fitted(module, clients, fedbe).state.server, fedavg)  # nothing to distil on
    assert not same_network(fitted(module, with_inputs(clients), fedbe).state.server, fedavg)


def test_personalisation_is_fedavgs() -> None:
    clients, plan = with_inputs(labelled(9, 6, 5)), plan_of(epochs=2, train_head=True)
    problem = holding(problem_of(mlp(4, 5, 3), clients), clients.server_inputs)
    mine, theirs = (
        algorithm.personalise(
            problem, algorithm.start(problem, RNG), clients, {}, plan, RNG
        ).arrays()
        for algorithm in (FedBE(), FedAvg(update="body"))
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert (mine["head"][:, 0] - problem.network.head).abs().amax(1).min() > 1e-3


def explicit_moments(
    problem: Problem, server: Arrays, found: Arrays, key: str
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the gaussian posterior from all clients at once, one tensor of the
    module after another.
    """
    means, deviations = [], []
    shapes = [
        p.shape
        for n, p in problem.network.module.named_parameters()
        if n.startswith("2.") == (key == "head")
    ]
    change = (found[key] - server[key]).split([s.numel() for s in shapes], dim=1)
    for tensor in change:
        norms = tensor.norm(dim=1, keepdim=True)
        directions = tensor / norms
        means.append(norms.mean() * directions.mean(0))
        deviations.append(norms.mean() * directions.var(0, unbiased=False).clamp_min(FLOOR).sqrt())
    return server[key] + torch.cat(means), torch.cat(deviations)


def test_gaussian_teachers_have_the_clients_moments() -> None:
    clients, algorithm = (
        labelled(9, 6, 4, 7),
        FedBE(update="full", num_components=20_000, spread=0.7),
    )
    problem = holding(problem_of(mlp(4, 5, 3), clients), normal(3, 4))
    server, found, summary = one_round(algorithm, problem, clients)
    teachers = algorithm.teachers(problem, server, summary, RNG)
    for key in ("theta", "head"):
        mean, deviation = explicit_moments(problem, server, found, key)
        deviation = 0.7 * deviation
        assert teachers[key].shape == (20_000, len(server[key]))
        centred = (teachers[key] - mean) / deviation
        # Standard normal if the moments are right. Five standard errors, of the mean and of the
        # variance.
        assert centred.mean(0).abs().max() < 5 / math.sqrt(20_000)
        assert (centred.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / 20_000)
    # Without spread every teacher is the mean, to roundings of numbers below ten.
    still = replace(algorithm, num_components=2, spread=0.0).teachers(problem, server, summary, RNG)
    for key in ("theta", "head"):
        mean, _ = explicit_moments(problem, server, found, key)
        torch.testing.assert_close(still[key], mean.expand(2, -1), rtol=0, atol=1e-14)
    # Every round draws its own.
    assert not torch.equal(
        algorithm.teachers(problem, server, summary, Randomness(0, 2))["theta"], teachers["theta"]
    )


@pytest.mark.parametrize("weighted", [True, False])
def test_dirichlet_teachers_are_convex_combinations_by_the_drawn_weights(weighted: bool) -> None:
    clients, algorithm = (
        labelled(9, 6, 4),
        FedBE(posterior="dirichlet", num_components=5, weighted=weighted),
    )
    problem = holding(problem_of(mlp(4, 5, 3), clients), normal(3, 4))
    server, found, summary = one_round(algorithm, problem, clients)
    g = found["g"] * (clients.sizes.double().unsqueeze(1) if weighted else 1.0)  # [C, S]
    expected = (g / g.sum(0)).T @ found["theta"]
    teachers = algorithm.teachers(problem, server, summary, RNG)["theta"]
    torch.testing.assert_close(
        teachers, expected, rtol=0, atol=1e-14
    )  # numbers below one, differences to theta and back
    assert (teachers[0] - teachers[1]).abs().max() > 1e-3


def test_a_small_concentration_chooses_a_client_for_each_teacher() -> None:
    """With weights far below float32's smallest number, too: only their ratios count."""
    clients, algorithm = labelled(9, 9, 9), FedBE(posterior="dirichlet", num_components=3)
    problem = holding(problem_of(mlp(4, 5, 3).float(), clients), normal(3, 4).float())
    server, found, _ = one_round(algorithm, problem, clients)
    found["g"] = 1e-60 * torch.eye(3).double() + 1e-90
    summary = algorithm.summarise(problem, algorithm.broadcast(server, [0, 1, 2]), found, RNG)
    teachers = algorithm.teachers(problem, server, summary, RNG)["theta"]
    torch.testing.assert_close(
        teachers, found["theta"], rtol=1e-6, atol=1e-8
    )  # one rounding to float32
    assert (teachers - server["theta"]).abs().amax(1).min() > 1e-3


def test_dirichlet_teachers_are_the_fedavg_mean_for_a_large_concentration() -> None:
    clients = labelled(9, 6, 4, 7)
    problem = holding(problem_of(mlp(4, 5, 3), clients), normal(3, 4))
    apart = {}
    for alpha in (1.0, 1e4, 1e8):
        algorithm = FedBE(posterior="dirichlet", alpha=alpha, num_components=50, distill_epochs=0)
        server, found, summary = one_round(algorithm, problem, clients)
        mean = algorithm.aggregate(problem, server, summary, RNG)["theta"]
        apart[alpha] = (
            (algorithm.teachers(problem, server, summary, RNG)["theta"] - mean).abs().max().item()
        )
        spread = (found["theta"] - mean).abs().max().item()
        # A weight deviates from its mean by alpha^-1/2, relative: six of these on the largest
        # distance between client and mean.
        assert apart[alpha] < 6 * alpha**-0.5 * spread
    assert (
        apart[1.0] > 30 * apart[1e4] > 900 * apart[1e8] > 0
    )  # each is a hundred times nearer than the one before


def test_the_students_loss_is_the_kl_from_its_teachers() -> None:
    outputs, p = normal(2, 5, 4).requires_grad_(), normal(2, 5, 4, seed=1).softmax(-1)
    kl = (p * (p.log() - outputs.log_softmax(-1))).sum(-1)
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(
        Soft(Categorical(4)).loss(outputs, p), kl + entropy, rtol=1e-14, atol=0
    )
    # Real targets: KL between normal densities, up to the entropy of the teacher (and, in `loss`,
    # the log of the scale).
    likelihood = GaussianRegression(2, centre=0.3, scale=1.7)
    moments = torch.stack([normal(2, 5, 2), normal(2, 5, 2, seed=1).exp()], dim=-2)
    teacher = torch.distributions.Normal(moments[..., 0, :], moments[..., 1, :].sqrt())
    mean, variance = likelihood.predictive(outputs).unbind(-2)
    kl = torch.distributions.kl_divergence(
        teacher, torch.distributions.Normal(mean, variance.sqrt())
    ).sum(-1)
    expected = kl + teacher.entropy().sum(-1) - 2 * math.log(1.7)
    torch.testing.assert_close(
        Soft(likelihood).loss(outputs, moments), expected, rtol=1e-12, atol=0
    )  # a handful of roundings


@pytest.mark.parametrize("rows", [12, 3])
def test_distillation_is_the_least_squares_fit_of_the_teachers_mean_prediction(rows: int) -> None:
    """A linear network with noise of a fixed size.

    With fewer inputs than weights, the fit nearest to the FedAvg mean.
    """
    d = 5
    problem = problem_of(linear(d), regression(4, 4, inputs=d), GaussianRegression(noise=1.0))
    x = normal(rows, d, seed=4).float()
    teachers, mean = {"theta": normal(3, d, seed=5)}, {"theta": normal(d, seed=6)}
    algorithm = FedBE(
        server_lr=0.2,
        server_momentum=0.5,
        server_batch_size=rows,
        distill_epochs=400,
        swa_start=1.0,
    )
    student = algorithm.distil(holding(problem, x), mean, teachers, RNG)["theta"]
    inputs = x.double()
    target = (
        torch.cat([mean["theta"].unsqueeze(0), teachers["theta"]]) @ inputs.T
    )  # [teachers, rows]
    # mean + X^+ (p - X mean): the least-squares solution nearest to where the student starts
    expected = mean["theta"] + torch.linalg.pinv(inputs) @ (target.mean(0) - inputs @ mean["theta"])
    # The slowest direction shrinks by 0.91 a step (the smallest eigenvalue is 0.2): 400 steps leave
    # roundings.
    torch.testing.assert_close(student, expected, rtol=0, atol=1e-12)
    assert (expected - mean["theta"]).norm() > 0.3
