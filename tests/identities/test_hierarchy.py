"""Inference where the answer is known: linear-Gaussian hierarchies, conjugate evidence, logistic
regression by quadrature.

Clients have linear models and known noise, so a client's objective is quadratic: its exact step is
a linear system, made here from the library's `pull`. The server's step is the library's
`aggregate`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    aggregate,
    examples,
    linear,
    mixture,
    niw,
    normal,
    plan_of,
    problem_of,
    regression,
    seeded,
    vector_problem,
)
from scipy import stats
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional

from fedhb.algorithms import NIW, Arrays, Hierarchical, Problem, objectives
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression

SIZES, D, NOISE = (8, 5, 12, 6), 3, 0.4


N = len(SIZES)


def linear_gaussian() -> tuple[Problem, Clients]:
    clients = regression(*SIZES, inputs=D)
    return problem_of(linear(D), clients, GaussianRegression(noise=NOISE)), clients


def likelihood_terms(clients: Clients, c: int) -> tuple[Tensor, Tensor]:
    """A, b of the client's loss 1/2 m' A m - b' m + constant."""
    x, y = examples(clients, c)
    return x.T @ x / NOISE**2, x.T @ y / NOISE**2


def exact_clients(
    algorithm: Hierarchical, problem: Problem, server: Arrays, clients: Clients
) -> Tensor:
    """argmin of every client's objective: the loss, and the pull times |D_i|."""
    pull = algorithm.pull(problem, server, clients.sizes)
    assert isinstance(pull.target, Tensor)
    precision = pull.mu.expand(len(clients), D) * clients.sizes.unsqueeze(1)
    found = []
    for c in range(len(clients)):
        A, b = likelihood_terms(clients, c)
        found.append(torch.linalg.solve(A + precision[c].diag(), b + precision[c] * pull.target))
    return torch.stack(found)


def descend(algorithm: Hierarchical, rounds: int) -> tuple[Tensor, Arrays, list[float]]:
    """Block-coordinate descent from the initial network; the negative ELBO after every half-step."""
    problem, clients = linear_gaussian()
    server = algorithm.start(problem, RNG)
    m, values = algorithm.centre(server).expand(N, -1), []
    for _ in range(rounds):
        values.append(objectives.negative_elbo(algorithm, problem, server, clients, m).item())
        m = exact_clients(algorithm, problem, server, clients)
        values.append(objectives.negative_elbo(algorithm, problem, server, clients, m).item())
        server = aggregate(algorithm, problem, server, m)
    return (
        m,
        server,
        [*values, objectives.negative_elbo(algorithm, problem, server, clients, m).item()],
    )


def joint_posterior_mean(sigma2: float) -> Tensor:
    """The mean of (theta_1 .. theta_N, mu) given all data [N + 1, d], from one linear system."""
    _, clients = linear_gaussian()
    precision = torch.zeros(N + 1, D, N + 1, D, dtype=torch.float64)
    right = torch.zeros(N + 1, D, dtype=torch.float64)
    identity = torch.eye(D, dtype=torch.float64)
    precision[N, :, N] = identity * (1 + N / sigma2)
    for i in range(N):
        A, right[i] = likelihood_terms(clients, i)
        precision[i, :, i] = A + identity / sigma2
        precision[i, :, N] = precision[N, :, i] = -identity / sigma2
    size = (N + 1) * D
    return torch.linalg.solve(precision.view(size, size), right.view(size)).view(N + 1, D)


@pytest.mark.parametrize("sigma2", [0.1, 2.0])
def test_block_coordinate_descent_finds_the_joint_posterior_mean(sigma2: float) -> None:
    m, server, values = descend(mixture(num_prototypes=1, sigma2=sigma2), rounds=40)
    exact = joint_posterior_mean(sigma2)
    # A round leaves about a third of the error (0.35^40 = 1e-18), and the systems' conditions are
    # below a thousand.
    torch.testing.assert_close(server["r"][0], exact[N], rtol=0, atol=1e-13)
    torch.testing.assert_close(m, exact[:N], rtol=0, atol=1e-13)
    falls = -np.diff(values)
    assert (falls >= -1e-12).all()  # at the end the value, near a hundred, only rounds
    assert falls[:4].min() > 1e-5


def test_the_clients_own_sgd_finds_it_too() -> None:
    problem, clients = linear_gaussian()
    algorithm = mixture(num_prototypes=1, sigma2=0.1, begin="last")
    server, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    plan = plan_of(epochs=60, batch_size=12, lr=0.02)  # full batches; the loss has curvature 20
    for _ in range(15):
        found, memory = algorithm.local_update(problem, server, clients, memory, plan, RNG)
        server = aggregate(algorithm, problem, server, found["m"])
    exact = joint_posterior_mean(sigma2=0.1)
    # Each round leaves about a third of the error (so do exact steps): 0.35^15 = 1e-7.
    torch.testing.assert_close(server["r"][0], exact[N], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["m"], exact[:N], rtol=0, atol=1e-6)


@pytest.mark.parametrize("prototypes", [1, 2])
def test_the_negative_elbo_is_the_joint_density_up_to_a_constant(prototypes: int) -> None:
    """q is a point for Mixture, so that -ELBO is -log p(D, theta, phi) at that point plus the
    entropy of the spikes.
    """
    problem, clients = linear_gaussian()
    algorithm = mixture(num_prototypes=prototypes, sigma2=0.5)
    identity, constants = torch.eye(D, dtype=torch.float64), []
    for seed in range(5):
        r, m = normal(prototypes, D, seed=seed), normal(N, D, seed=100 + seed)
        log_joint = (
            MultivariateNormal(torch.zeros(D, dtype=torch.float64), identity).log_prob(r).sum()
        )
        for i in range(N):
            x, y = examples(clients, i)
            log_joint += stats.norm.logpdf(y, x @ m[i], NOISE).sum()
            log_joint += (
                torch.stack([MultivariateNormal(r_j, 0.5 * identity).log_prob(m[i]) for r_j in r])
                .exp()
                .mean()
                .log()
            )
        constants.append(
            (objectives.negative_elbo(algorithm, problem, {"r": r}, clients, m) + log_joint).item()
        )
    # Values of some hundreds, that differ by hundreds between the points.
    assert constants == pytest.approx([constants[0]] * 5, abs=1e-10)


@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
@pytest.mark.parametrize("p_do", [1.0, 0.9])
@pytest.mark.parametrize("dof", ["full", "per_coordinate"])
def test_every_half_step_lowers_the_negative_elbo_with_the_mean_precision(
    dof: str, p_do: float, kl_weight: float
) -> None:
    """E_{q(phi)} KL(q_i || p(theta_i | phi)) has the precision E[Sigma^-1] = n0 / V0, also with
    dropout: its gradient is

        n0 / V0 (p_do (p_do m - m0) + p_do (1 - p_do) m) = p_do n0 / V0 (m - m0).

    So the client's step with precision="mean" is the exact step of this block, and no half-step can
    raise -ELBO. (The expected loss is taken at m, as `negative_elbo` does, not over dropout masks.)
    """
    algorithm = niw(dof=dof, p_do=p_do, kl_weight=kl_weight, precision="mean", prior_scale=0.5)
    _, _, values = descend(algorithm, rounds=30)
    falls = -np.diff(values)
    assert (falls >= -1e-12).all()  # at the end the value, near a hundred, only rounds
    assert falls[:6].min() > 1e-5


@pytest.mark.parametrize("dof", ["full", "per_coordinate"])
def test_the_modes_precision_raises_the_negative_elbo_at_its_optimum(dof: str) -> None:
    """The mode of q(phi) has the precision (n0 + dim + 1) / V0, not that of the expectation: at the
    optimum of -ELBO, where the mean's client step stays, the mode's goes away (nearer to m0).

    It lowers its own objective all the same.
    """
    problem, clients = linear_gaussian()
    mean = niw(dof=dof, p_do=1.0, precision="mean", prior_scale=0.5)
    mode = dataclasses.replace(mean, precision="mode")
    m, server, _ = descend(mean, rounds=100)
    optimum = objectives.negative_elbo(mean, problem, server, clients, m)
    stays, goes = (exact_clients(a, problem, server, clients) for a in (mean, mode))
    torch.testing.assert_close(stays, m, rtol=0, atol=1e-10)  # a hundred rounds are enough
    rise = objectives.negative_elbo(mode, problem, server, clients, goes) - optimum
    # To second order the rise is half the curvature n0/V0 + A times the move squared.
    move = goes - m
    curvature = (
        torch.stack([likelihood_terms(clients, c)[0] for c in range(N)])
        + mean.prior_precision(problem, server).diag()
    )
    expected = 0.5 * torch.einsum("ci,cij,cj->", move, curvature, move)
    assert rise.item() == pytest.approx(
        expected.item(), rel=1e-6
    )  # the optimum is the optimum to 1e-10
    assert rise > 1e-3
    before, after = (
        objectives.client_objective(mode, problem, server, clients, at) for at in (m, goes)
    )
    assert (after < before).all()
    assert ((goes - server["m0"]).abs().sum() < (m - server["m0"]).abs().sum()).all()


def log_evidence(m: Tensor, lambda0: float, prior_scale: float) -> float:
    """log p(m_1 .. m_N) of d one-dimensional NIWs: each m_i under the Student-t predictive of those
    before it.
    """
    total = 0.0
    for i, m_i in enumerate(m.numpy()):
        seen = m.numpy()[:i]
        l, n = lambda0 + i, 3.0 + i
        centre = seen.sum(0) / l
        V = prior_scale**2 + (seen**2).sum(0) - l * centre**2
        total += stats.t.logpdf(m_i, df=n, loc=centre, scale=np.sqrt((l + 1) * V / (l * n))).sum()
    return total


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("dof", "d"), [("per_coordinate", 4), ("full", 1)])
def test_the_servers_objective_at_its_minimum_is_the_evidence_of_the_clients(
    dof: str, d: int, count: int
) -> None:
    """With |D| = N the fixed l0 and n0 are those of the conjugate posterior given theta_i = m_i;
    without spikes (eps = 0)

    min L_0 = min KL(q(phi) || p(phi)) - E_q log p(m_1 .. m_N | phi) = -log p(m_1 .. m_N), every
    constant included.
    """
    problem, m = vector_problem(d, num_clients=count, num_examples=count), normal(count, d, seed=1)
    algorithm = niw(dof=dof, p_do=1.0, eps=0.0, lambda0=0.7, prior_scale=0.6)
    server = aggregate(algorithm, problem, algorithm.start(problem, RNG), m)
    # Digamma and log-gamma functions and sums, of numbers near ten.
    assert objectives.server_objective(algorithm, problem, server, m).item() == pytest.approx(
        -log_evidence(m, 0.7, 0.6), abs=1e-12
    )


@pytest.mark.parametrize(
    "algorithm", [mixture(num_prototypes=1, sigma2=0.5), niw(p_do=0.9, lambda0=2.0)]
)
def test_cohorts_give_the_right_mean_in_expectation(algorithm: Hierarchical) -> None:
    problem, _ = linear_gaussian()
    m, server = normal(N, D, seed=1), algorithm.start(problem, RNG)
    key = "m0" if isinstance(algorithm, NIW) else "r"
    everyone = aggregate(algorithm, problem, server, m)[key]
    cohorts = [
        aggregate(algorithm, problem, server, m[list(who)])[key]
        for who in itertools.combinations(range(N), 2)
    ]
    torch.testing.assert_close(
        torch.stack(cohorts).mean(0), everyone, rtol=0, atol=1e-14
    )  # a mean of six numbers near one


class Logistic(nn.Module):
    """Two classes, the second with logit w . x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.weight(x)
        return torch.cat([torch.zeros_like(z), z], -1)


def logistic() -> tuple[Clients, Tensor, Tensor]:
    random = np.random.default_rng(0)
    x = random.normal(size=(12, D))
    y = (x @ np.array([1.0, -1.0, 0.5]) + random.logistic(size=12) > 0).astype(np.int64)
    clients = Clients.from_arrays([(x, y)])
    return clients, *examples(clients, 0)


def grid(nodes: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The product of three one-dimensional rules: points [n^3, 3] and log weights [n^3]."""
    return torch.cartesian_prod(nodes, nodes, nodes), torch.cartesian_prod(*[log_weights] * D).sum(
        -1
    )


@pytest.mark.parametrize(
    ("dof", "eps", "closest"), [("full", 0.3, 2.0), ("per_coordinate", 0.6, 1.4)]
)
def test_the_negative_elbo_is_above_the_negative_log_evidence(
    dof: str, eps: float, closest: float
) -> None:
    """-ELBO = L_0 + E_{q_1}[-log p(D | theta)] - entropy of q_1, q_1 = N(m, eps^2 I) with a width
    that is not small.

    What is left between the two is the price of a factorised q (and of a diagonal V0). A constant
    that was dropped would show: d/2 log 2 pi = 2.76, say, is more than the gap at the best m.
    """
    clients, x, y = logistic()
    problem = problem_of(
        seeded(Logistic), clients, head="", num_examples=1
    )  # l0 and n0 of the conjugate posterior
    algorithm = niw(dof=dof, p_do=1.0, eps=eps, precision="mean")

    def loss(theta: Tensor) -> Tensor:
        z = theta @ x.T
        return functional.softplus(torch.where(y == 1, -z, z)).sum(-1)

    # The prior of theta is a Student-t with heavy tails: the trapezoidal rule in arsinh(theta) has
    # its mass to 1e-6.
    u = torch.linspace(-6, 6, 61, dtype=torch.float64)
    theta, log_weights = grid(u.sinh(), u.cosh().log() + math.log(u[1] - u[0]))
    log_prior = log_weights + algorithm.prior(problem).predictive().log_prob(theta)
    assert log_prior.logsumexp(0).abs() < 1e-6
    surprise = -(log_prior - loss(theta)).logsumexp(0)

    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    z, log_weights = grid(
        torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2 * math.pi)).log()
    )
    entropy = D / 2 * math.log(2 * math.pi * math.e * eps**2)

    def negative_elbo(m: Tensor) -> Tensor:
        server = aggregate(algorithm, problem, algorithm.start(problem, RNG), m.detach())
        expected_loss = (log_weights.exp() * loss(m + eps * z)).sum()
        return objectives.server_objective(algorithm, problem, server, m) + expected_loss - entropy

    for seed in range(10):
        assert negative_elbo(normal(1, D, seed=seed)) > surprise
    m = torch.zeros(1, D, dtype=torch.float64, requires_grad=True)
    for _ in range(200):  # the server's step, then a small one of the client
        (gradient,) = torch.autograd.grad(negative_elbo(m), m)
        m = (m - 0.1 * gradient).detach().requires_grad_()
    assert gradient.abs().max() < 1e-3
    assert 0 < negative_elbo(m) - surprise < closest
