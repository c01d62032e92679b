"""NIW: the server's closed form against its objective and the paper's matrices, the clients' pull, and its special cases."""

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
    plan_of,
    problem_of,
    seeded,
    vector_problem,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import NIW, FedBABU, FedProx, Problem
from fedhb.distributions import spiky_kl
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER

N, D, EXAMPLES = 7, 5, 40  # clients, weights, training examples of all clients
DOFS = ["full", "per_coordinate"]


def server_problem() -> Problem:
    return vector_problem(D, num_clients=N, num_examples=EXAMPLES)


def clients_m(count: int, seed: int = 1) -> Tensor:
    """m_i around a point that is neither zero nor the initial network."""
    return normal(D, seed=99) + 0.7 * normal(count, D, seed=seed)


def solved(algorithm: NIW, problem: Problem, m: Tensor) -> dict[str, Tensor]:
    return aggregate(algorithm, problem, algorithm.start(problem, RNG), m)


def dimension(dof: str) -> int:
    return D if dof == "full" else 1


# ---- the server


@pytest.mark.parametrize("cohort", [N, 3])
@pytest.mark.parametrize("p_do", [1.0, 0.9])
@pytest.mark.parametrize("lambda0", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("dof", DOFS)
def test_the_servers_solution_minimises_its_objective(
    dof: str, lambda0: float, p_do: float, cohort: int
) -> None:
    problem, m = server_problem(), clients_m(cohort)
    algorithm = niw(dof=dof, lambda0=lambda0, p_do=p_do, prior_scale=0.3, eps=0.05)
    best = solved(algorithm, problem, m)

    def objective(m0: Tensor, V0: Tensor) -> Tensor:
        return algorithm.server_objective(problem, {"m0": m0, "V0": V0}, m)

    m0, V0 = best["m0"].requires_grad_(), best["V0"].requires_grad_()
    lowest = objective(m0, V0)
    by_m0, by_V0 = torch.autograd.grad(lowest, (m0, V0))
    # The gradients are differences of sums n0 N m / V0 and (N + dim + 2) / V0: zero to some roundings of these. With lambda0 = 0
    # the objective has 1e-12 in its place, against N.
    dim = dimension(dof)
    n0 = EXAMPLES + dim + 2
    assert (by_m0 * V0).abs().max() < 1e-12 * n0 * N * m.abs().max()
    assert (by_V0 * V0).abs().max() < 1e-12 * (N + dim + 2)

    # The minimum is the only one, so steps of any size raise the objective, by far more than its rounding (1e-14).
    noise = generator(3)
    for scale in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            step, stretch = scale * torch.randn(2, D, generator=noise, dtype=torch.float64)
            assert objective(m0 + step, V0) > lowest + 1e-10
            assert objective(m0, V0 * stretch.exp()) > lowest + 1e-10
            assert objective(m0 + step, V0 * stretch.exp()) > lowest + 1e-10


def printed_solution(m: Tensor, p_do: float, eps: float) -> tuple[Tensor, Tensor]:
    """eq:niw_server_m0_V0 as in Alg. 4, step 5: outer products and all, the diagonal taken at the end."""
    n0, share = EXAMPLES + D + 2, N / len(m)
    m0 = p_do / (N + 1) * share * m.sum(0)
    total = (1 + N * eps**2) * torch.eye(D, dtype=torch.float64) + torch.outer(m0, m0)
    for m_i in m:
        cross = torch.outer(m0, m_i)
        rho = p_do * torch.outer(m_i, m_i) - p_do * cross - p_do * cross.T + torch.outer(m0, m0)
        total = total + share * rho
    return m0, (n0 / (N + D + 2) * total).diagonal()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("p_do", [1.0, 0.9])
def test_streamed_sums_give_the_papers_matrices(p_do: float, chunk: int, order: list[int]) -> None:
    problem, m = server_problem(), clients_m(5)
    algorithm = niw(p_do=p_do, eps=0.05)
    server = aggregate(algorithm, problem, algorithm.start(problem, RNG), m[order], chunk)
    m0, V0 = printed_solution(m, p_do, eps=0.05)
    # The sums are taken from the old m0, the formula's from zero: both lose some roundings of numbers near one to ten.
    torch.testing.assert_close(server["m0"], m0, rtol=0, atol=1e-14)
    torch.testing.assert_close(server["V0"], V0, rtol=1e-13, atol=0)


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


# ---- the clients


@pytest.mark.parametrize("sizes", [[6, 6, 6], [3, 10, 27]])
@pytest.mark.parametrize("precision", ["mode", "mean"])
@pytest.mark.parametrize("dof", DOFS)
def test_the_pull_is_the_gradient_of_the_kl(dof: str, precision: str, sizes: list[int]) -> None:
    problem, m = server_problem(), clients_m(3).requires_grad_()
    algorithm = niw(dof=dof, precision=precision, kl_weight=0.3, p_do=0.9)
    received = {"m0": normal(D, seed=7), "V0": normal(D, seed=8).exp()}
    pull = algorithm.pull(problem, received, torch.tensor(sizes))
    (gradient,) = torch.autograd.grad(0.3 * algorithm.kl(problem, received, m).sum(), m)
    by_pull = pull.mu * (m - pull.target)
    # A handful of products: some roundings.
    torch.testing.assert_close(
        by_pull, gradient / torch.tensor(sizes).unsqueeze(1), rtol=1e-14, atol=0
    )
    # and as printed: p_do (n0 + d + 1) / V0 (m - m0)
    dim = dimension(dof)
    weight = EXAMPLES + dim + 2 + (dim + 1 if precision == "mode" else 0)
    torch.testing.assert_close(
        gradient, 0.3 * 0.9 * weight / received["V0"] * (m - received["m0"]), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("dof", DOFS)
def test_the_kl_is_that_of_a_spiky_mixture_up_to_a_constant(dof: str) -> None:
    problem, m = server_problem(), clients_m(4)
    received = {"m0": normal(D, seed=7), "V0": normal(D, seed=8).exp()}
    at_mode = niw(dof=dof, p_do=0.9)
    full = spiky_kl(m, 0.9, at_mode.eps, *at_mode.posterior(problem, received).mode())
    constant = full - at_mode.kl(problem, received, m)
    torch.testing.assert_close(
        constant, constant[:1].expand(4), rtol=1e-12, atol=0
    )  # thousands, less some roundings
    # With the mean precision it is what the server's objective takes from the clients, E log N(theta_i; mu, Sigma).
    in_mean = niw(dof=dof, p_do=0.9, precision="mean")
    constant = in_mean.kl(problem, received, m) + in_mean.expected_log_prior(problem, received, m)
    torch.testing.assert_close(constant, constant[:1].expand(4), rtol=1e-12, atol=0)


def test_an_isotropic_V0_is_fedprox() -> None:
    clients = labelled(9, 6, 3)
    problem = problem_of(mlp(4, 5, 3), clients)
    alpha, plan, start = 0.8, plan_of(epochs=3), problem.network.theta
    d = problem.network.num_params
    received = {"m0": start, "V0": torch.full_like(start, alpha)}
    found, _ = niw(p_do=1.0, kl_weight=0.02).local_update(problem, received, clients, {}, plan, RNG)
    n0 = clients.num_examples + d + 2
    for c, size in enumerate(clients.sizes.tolist()):
        fedprox = FedProx(mu=0.02 * (n0 + d + 1) / (alpha * size), update="body")
        alone, _ = fedprox.local_update(
            problem, {"theta": start}, clients.select([c]), {}, plan, RNG
        )
        # The strength and the batched products are rounded in another order, at nine steps or fewer.
        torch.testing.assert_close(found["m"][c], alone["theta"][0], rtol=0, atol=1e-13)
        without, _ = FedBABU().local_update(
            problem, {"theta": start}, clients.select([c]), {}, plan, RNG
        )
        assert (
            alone["theta"] - without["theta"]
        ).abs().max() > 1e-2  # the pull matters in this comparison


def batch_normed() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    )


@pytest.mark.filterwarnings("ignore:the prior .* shortens weights")
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_without_prior_and_dropout_it_is_fedbabu_to_the_bit(make) -> None:
    clients, module = labelled(9, 6, 4, 7, 8), make()
    settings = {
        "rounds": 4,
        "fraction": 0.6,
        "batch_size": 4,
        "local_epochs": 2,
        "seed": 3,
        "progress": False,
    }
    plain = fedhb.fit(
        module, clients, niw(kl_weight=0.0, lambda0=0.0, p_do=1.0), **settings
    ).state.server
    fedbabu = fedhb.fit(module, clients, FedBABU(), **settings).state.server
    assert torch.equal(plain["m0"], fedbabu["theta"])
    assert ("buffers" in fedbabu) == ("buffers" in plain) == (make is batch_normed)
    if "buffers" in fedbabu:
        assert torch.equal(plain["buffers"], fedbabu["buffers"])
    shrunk = fedhb.fit(
        module, clients, niw(kl_weight=0.0, lambda0=1e-3, p_do=1.0), **settings
    ).state.server
    assert not torch.equal(shrunk["m0"], fedbabu["theta"])


# ---- prediction


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
    # Five standard errors; nu = 12 has the fourth moment they need. An error of 5 percent in the variance is 9 of them.
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
