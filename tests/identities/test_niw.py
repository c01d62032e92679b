"""NIW: the server's closed form against its objective and the paper's matrices, the clients' pull,
and its special cases.
"""

from __future__ import annotations

import pytest
import torch
from problems import (
    RNG,
    aggregate,
    batch_normed,
    generator,
    labelled,
    mlp,
    niw,
    normal,
    plan_of,
    problem_of,
    vector_problem,
)
from torch import Tensor

import fedhb
from fedhb.algorithms import NIW, FedBABU, FedProx, Problem, objectives
from fedhb.distributions import spiky_kl

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
        return objectives.server_objective(algorithm, problem, {"m0": m0, "V0": V0}, m)

    m0, V0 = best["m0"].requires_grad_(), best["V0"].requires_grad_()
    lowest = objective(m0, V0)
    by_m0, by_V0 = torch.autograd.grad(lowest, (m0, V0))
    # The gradients are differences of sums n0 N m / V0 and (N + dim + 2) / V0: zero to some
    # roundings of these. With lambda0 = 0 the objective has 1e-12 in its place, against N.
    dim = dimension(dof)
    n0 = EXAMPLES + dim + 2
    assert (by_m0 * V0).abs().max() < 1e-12 * n0 * N * m.abs().max()
    assert (by_V0 * V0).abs().max() < 1e-12 * (N + dim + 2)

    # The minimum is the only one, so steps of any size raise the objective, by far more than its
    # rounding (1e-14).
    noise = generator(3)
    for scale in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            step, stretch = scale * torch.randn(2, D, generator=noise, dtype=torch.float64)
            assert objective(m0 + step, V0) > lowest + 1e-10
            assert objective(m0, V0 * stretch.exp()) > lowest + 1e-10
            assert objective(m0 + step, V0 * stretch.exp()) > lowest + 1e-10


def printed_solution(m: Tensor, p_do: float, eps: float) -> tuple[Tensor, Tensor]:
    """eq:niw_server_m0_V0 as in Alg. 4, step 5: outer products and all, the diagonal taken at the
    end.
    """
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
    # The sums are taken from the old m0, the formula's from zero: both lose some roundings of
    # numbers near one to ten.
    torch.testing.assert_close(server["m0"], m0, rtol=0, atol=1e-14)
    torch.testing.assert_close(server["V0"], V0, rtol=1e-13, atol=0)


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
    # With the mean precision it is what the server's objective takes from the clients, E log
    # N(theta_i; mu, Sigma).
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
        # The strength and the batched products are rounded in another order, at nine steps or
        # fewer.
        torch.testing.assert_close(found["m"][c], alone["theta"][0], rtol=0, atol=1e-13)
        without, _ = FedBABU().local_update(
            problem, {"theta": start}, clients.select([c]), {}, plan, RNG
        )
        assert (
            alone["theta"] - without["theta"]
        ).abs().max() > 1e-2  # the pull matters in this comparison


@pytest.mark.filterwarnings("ignore:.*running statistics")
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
