"""pFedBayes: the mean-field posterior of a linear model, and where it is FedAvg."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    examples,
    generator,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    regression,
    seeded,
)
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedhb.algorithms import FedAvg, Problem
from fedhb.algorithms.pfedbayes import Pair, PFedBayes
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression

NOISE = 0.4


def dropping() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))
    )


def linear_gaussian(*sizes: int) -> tuple[Problem, Clients]:
    clients = regression(*sizes)
    return problem_of(linear(3), clients, GaussianRegression(noise=NOISE)), clients


class Held(Pair):
    """A pair whose w stays where it is."""

    def step(self, active: slice | Tensor, gradient: Tensor) -> None:
        w = self.values[2:].clone()
        super().step(active, gradient)
        self.values[2:], self.velocities[2:] = w, 0.0

    def _pull(self, value: Tensor, velocity: Tensor, target: Tensor, stiffness: Tensor) -> None:
        if value.data_ptr() != self.values[2].data_ptr():
            super()._pull(value, velocity, target, stiffness)


def mean_field(zeta: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For a linear model with known noise and w given, E_q[loss] + zeta KL(q || w) has its minimum
    at

        (A + zeta P) mu = b + zeta P mu_w,   sigma_k^2 = zeta / (A_kk + zeta P_kk)

    with A = X'X / noise^2, b = X'y / noise^2, P = 1 / sigma_w^2. Eight examples.
    """
    x, y = examples(linear_gaussian(8)[1], 0)
    A, b = x.T @ x / NOISE**2, x.T @ y / NOISE**2
    w = torch.stack([normal(3, seed=5), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)])
    P = softplus(w[1]).pow(-2)
    mu, variance = (
        torch.linalg.solve(A + zeta * P.diag(), b + zeta * P * w[0]),
        zeta / (A.diagonal() + zeta * P),
    )
    assert ((mu - w[0]).abs() > variance.sqrt()).any() and (
        (variance - 1 / P).abs() > 0.3 * variance
    ).any()  # not w itself
    return A, b, w, mu, variance


@pytest.mark.parametrize("zeta", [1.0, 0.3])
def test_with_w_fixed_it_finds_the_mean_field_posterior(zeta: float) -> None:
    """With the expected gradients: (A mu - b) / n in theta, and E[gradient noise] = A_kk sigma / n
    in sigma.
    """
    A, b, w, mu, variance = mean_field(zeta)
    pair = Held(
        torch.stack([*w, *w]).unsqueeze(1), torch.full((1, 1), zeta / 8).double(), plan_of(lr=0.05)
    )
    for _ in range(1200):
        gradient = (A @ pair.values[0, 0] - b) / 8
        pair.draw(slice(0, 1), [generator(0)])
        pair.noise[0] = A.diagonal() * softplus(pair.values[1, 0]) / 8 / gradient
        pair.step(slice(0, 1), gradient.unsqueeze(0))
    # The slowest direction, rho, keeps 1 - lr zeta / (8 (1 - momentum)) or so a step: 0.981^1200 =
    # 1e-10 of the way is left.
    torch.testing.assert_close(pair.values[0, 0], mu, rtol=0, atol=1e-8)
    torch.testing.assert_close(softplus(pair.values[1, 0]).square(), variance, rtol=1e-7, atol=0)


def test_with_w_fixed_its_own_noise_finds_the_mean_field_posterior() -> None:
    """Many copies of one client, each with noise of its own; at last small steps, so that rho
    hardly fluctuates.
    """
    A, b, w, mu, variance = mean_field(zeta=1.0)
    copies = 250
    pair = Held(
        torch.stack([*w, *w]).unsqueeze(1).repeat(1, copies, 1),
        torch.full((copies, 1), 1 / 8).double(),
        plan_of(),
    )
    everyone, generators = slice(0, copies), [generator(c) for c in range(copies)]
    for lr, steps in ((0.01, 200), (0.002, 400)):
        pair.plan = plan_of(lr=lr)
        for _ in range(steps):
            theta = pair.draw(everyone, generators)
            pair.step(everyone, (theta @ A - b) / 8)
    for ours, exact, scale in (
        (pair.values[0], mu, variance.sqrt()),
        (softplus(pair.values[1]).square(), variance, variance),
    ):
        # Five standard errors of the mean over independent copies, and for what steps of this size
        # leave one percent.
        error = ours.std(0) / math.sqrt(copies)
        assert (5 * error < 0.1 * scale).all()
        assert ((ours.mean(0) - exact).abs() < 5 * error + 0.01 * scale).all()


def test_no_zeta_is_too_stiff() -> None:
    """Means held together by lr zeta / (|D_i| sigma^2) of 1e9: an explicit step would overshoot a
    billion times.
    """
    problem, clients = linear_gaussian(6, 4)
    algorithm = PFedBayes(zeta=1e6)
    received = algorithm.start(problem, RNG)
    memory = algorithm.remember(problem, clients)
    memory["mu"] += 1.0
    found, memory = algorithm.local_update(
        problem, received, clients, memory, plan_of(epochs=40), RNG
    )
    # They meet in the first step and stay together.
    assert memory["mu"].abs().max() < 1e-6
    assert all(torch.isfinite(value).all() for value in [*found.values(), *memory.values()])


@pytest.mark.parametrize("update", ["body", "full"])
def test_with_a_strong_prior_and_no_width_it_is_fedavg(update: str) -> None:
    """q_i and w are one, and go the whole way of SGD: a strong coupling holds them to each other
    and not in place.
    """
    clients = labelled(9, 6, 7)
    problem = problem_of(mlp(4, 5, 3), clients)
    strong, fedavg = PFedBayes(zeta=1.0, rho0=-16.0, update=update), FedAvg(update=update)
    plan, server, plain = (
        plan_of(epochs=3, train_head=update == "full"),
        strong.start(problem, RNG),
        fedavg.start(problem, RNG),
    )
    memory = strong.remember(problem, clients)
    for number in (1, 2):  # in the second round clients begin at the new w
        rng = dataclasses.replace(RNG, round=number)
        found, memory = strong.local_update(problem, server, clients, memory, plan, rng)
        theirs, _ = fedavg.local_update(problem, plain, clients, {}, plan, rng)
        # sigma is 1e-7 and lr k 1e12; nine steps let the difference that the draws make grow some
        # ten times
        for key, other in (("mu", "theta"), *((("head", "head"),) if update == "full" else ())):
            torch.testing.assert_close(found[key], theirs[other], rtol=0, atol=1e-5)
            assert memory[key].abs().max() < 1e-5
        server = strong.aggregate(
            problem, server, strong.summarise(problem, server, found, rng), rng
        )
        plain = fedavg.aggregate(problem, plain, fedavg.summarise(problem, plain, theirs, rng), rng)
    assert (server["mu"] - problem.network.theta).abs().max() > 1e-2


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), dropping, batch_normed])
def test_without_prior_and_width_the_personal_model_is_trained_as_in_fedavg(
    make, update: str
) -> None:
    clients = labelled(9, 6, 7)
    problem = problem_of(make(), clients)
    narrow, fedavg = PFedBayes(zeta=0.0, rho0=-30.0, update=update), FedAvg(update=update)
    plan, personal = (
        plan_of(epochs=3, train_head=update == "full"),
        plan_of(epochs=3, train_head=True),
    )
    server, plain = narrow.start(problem, RNG), fedavg.start(problem, RNG)
    memory = narrow.remember(problem, clients)
    found, mine = narrow.local_update(problem, server, clients, memory, plan, RNG)
    theirs, _ = fedavg.local_update(problem, plain, clients, {}, plan, RNG)
    # sigma = 1e-13; nine steps, through a batch norm over as few as two examples, let a difference
    # grow some hundred times.
    mine = {key: value + server[key] for key, value in mine.items()}
    torch.testing.assert_close(mine["mu"], theirs["theta"], rtol=0, atol=1e-9)
    assert ("head" in mine) == (update == "full")
    for key in ("loss", "score", *(key for key in ("buffers",) if key in theirs)):
        torch.testing.assert_close(found[key], theirs[key], rtol=0, atol=1e-9)
    if update == "full":
        torch.testing.assert_close(mine["head"], theirs["head"], rtol=0, atol=1e-9)
    for key in ("mu", "rho", *(("head", "head_rho") if update == "full" else ())):
        assert torch.equal(found[key], server[key].expand(3, -1))  # nothing moves w
    ours = narrow.personalise(problem, server, clients, memory, personal, RNG).arrays()
    for key, value in (
        fedavg.personalise(problem, plain, clients, {}, personal, RNG).arrays().items()
    ):
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9)
    assert ((ours["head"][:, 0] - problem.network.head).abs().amax(1) > 1e-3).all()
    with_width = dataclasses.replace(narrow, rho0=-3.0)
    _, wide = with_width.local_update(
        problem, with_width.start(problem, RNG), clients, memory, plan, RNG
    )
    assert (wide["mu"] + server["mu"] - mine["mu"]).abs().max() > 1e-3  # noise matters
