"""The prior's variance by empirical Bayes: the best u and v by autograd, the curvature's estimate,
a truth found again.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import initial, labelled, mlp, normal, plan_of

import fedhb
from fedhb.algorithms import EmpiricalBayes, Federation, Problem, objectives
from fedhb.algorithms.empirical_bayes import curvature, variance
from fedhb.algorithms.empirical_bayes.variance import Evidence
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, per_weight, tensor_sizes
from fedhb.seeding import Randomness


def evidence_of(s: float, h: float, square: float = 0.0, clients: float = 7.0) -> Evidence:
    """Return the evidence of clients with mean scatter s; two measured h and tr(H^2) / d^2."""
    rows = (clients, clients * s, 2.0, 2.0 * h, 2.0 * square)
    return Evidence(*(torch.tensor([value], dtype=torch.float64) for value in rows))


@pytest.mark.parametrize(("s", "h"), [(1e-6, 0.1), (0.3, 2.0), (5.0, 1e3), (1e-3, 1e-4)])
def test_u_and_v_minimise_the_objective(s: float, h: float) -> None:
    seen = evidence_of(s, h)
    u = variance.best_variance(seen).requires_grad_()
    (slope,) = torch.autograd.grad((s / u + torch.log1p(u * h)).sum(), u)
    assert abs(slope.item()) * u.item() < 1e-10
    v = (1.0 / (1.0 / u.detach() + h)).requires_grad_()
    free = 0.5 * (
        v * h + (s + v) / u.detach() - 1 - (v / u.detach()).log()
    )  # expected loss and KL(N(m, v) || N(m0, u)), a weight
    (slope,) = torch.autograd.grad(free.sum(), v)
    assert abs(slope.item()) * v.item() < 1e-10
    # with the best v the free energy is the evidence, Occam's factor and all
    assert free.item() == pytest.approx(
        0.5 * s / u.item() + variance.occam(u.detach(), seen, [1]).item(), rel=1e-12
    )


def test_limits() -> None:
    assert variance.best_variance(evidence_of(0.3, 1e12)).item() == pytest.approx(
        0.3, rel=1e-6
    )  # data say all: the scatter itself
    assert variance.best_variance(evidence_of(1e-10, 0.1)).item() == pytest.approx(
        (1e-10 / 0.1) ** 0.5, rel=1e-3
    )
    assert 0 < variance.best_variance(evidence_of(0.0, 0.0)).item() < float("inf")


def test_curvature_is_the_fisher_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean over many draws of batches and targets, against the sum over classes of p |gradient|^2."""
    monkeypatch.setattr(curvature, "SHARE", 1.1)
    clients, network = labelled(40, 24), Network(mlp(4, 5, 3))
    problem = Problem(network, Categorical(3), Federation(2, 64, 3))
    weights, plan = initial(network, 2), dataclasses.replace(plan_of(1, 8), train_head=True)
    rounds = [
        curvature.measure(problem, weights, clients, plan, Randomness(0, r)) for r in range(3000)
    ]
    assert all(measured["measured"].all() for measured in rounds)
    keys = ("curvature", "curvature_squares")
    draws = torch.stack([torch.cat([measured[key] for key in keys], 1) for measured in rounds])
    found, error = draws.mean(0), draws.std(0) / 3000**0.5
    counts = tensor_sizes(network, True)
    module = mlp(4, 5, 3)
    with torch.no_grad():
        for slot in (*network.body_slots, *network.head_slots):
            source = network.theta if slot in network.body_slots else network.head
            dict(module.named_parameters())[slot.name].copy_(slot.of(source))
    for c in range(2):
        x, _ = clients.train.examples(c)
        fisher = [torch.zeros(d, d, dtype=torch.float64) for d in counts]
        for one in network.prepare(x.unsqueeze(0))[0]:
            log_p = module(one.unsqueeze(0)).log_softmax(-1)[0]
            for k in range(3):
                grads = torch.autograd.grad(log_p[k], list(module.parameters()), retain_graph=True)
                for F, g in zip(fisher, grads, strict=True):
                    F += log_p[k].detach().exp() * torch.outer(g.flatten(), g.flatten())
        traces = torch.stack([F.trace() / d for F, d in zip(fisher, counts, strict=True)])
        squares = torch.stack([(F @ F).trace() / d**2 for F, d in zip(fisher, counts, strict=True)])
        # two halves have no example in common: that is the square of F but for pairs of one example
        # with itself, a share 1/n
        expected = torch.cat([traces, squares])
        assert ((found[c] - expected).abs()[:4] < 5 * error[c][:4]).all()
        assert ((found[c] - expected).abs()[4:] < 5 * error[c][4:] + 0.1 * squares).all()
        assert (error[c] < 0.1 * expected).all()  # or the lines above say nothing


@pytest.mark.parametrize("truth", [0.03, 0.3])
def test_it_finds_the_truth_where_a_spike_collapses(truth: float) -> None:
    """y = x theta_i + 7 noise, theta_i ~ N(mu, u I): alternate exact client fits with the best u.

    Inputs are many and alike in all directions: where curvature is not, one v for all weights is
    too simple, and u comes out low.
    """
    N, n, d, noise = 1000, 100, 10, 7.0
    x, mu = normal(N, n, d, seed=1) / noise, normal(d, seed=2)
    theta = mu + truth**0.5 * normal(N, d, seed=3)
    y = (x @ theta.unsqueeze(-1)).squeeze(-1) + normal(N, n, seed=4)
    H, xy = x.mT @ x, (x.mT @ y.unsqueeze(-1)).squeeze(-1)
    h = H.diagonal(dim1=1, dim2=2).mean()
    ends = []
    for spike in (False, True):
        u, m0 = torch.tensor([1.0], dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
        for _ in range(100):
            m = torch.linalg.solve(H + torch.eye(d) / u, xy + m0 / u)
            m0 = m.mean(0)
            s = (m - m0).square().mean()
            u = (
                s.view(1).clamp_min(1e-9)
                if spike
                else variance.best_variance(evidence_of(s.item(), h.item()))
            )
        ends.append(u.item())
    assert ends[0] == pytest.approx(truth, rel=0.1)
    assert ends[1] < 1e-6


@pytest.mark.parametrize(("s", "h", "k"), [(1e-6, 0.1, 3.0), (0.3, 2.0, 12.0), (1e-3, 1e-4, 50.0)])
def test_u_under_concentrated_curvature_minimises_its_objective(
    s: float, h: float, k: float
) -> None:
    """S/u + k log(1 + u T/k), S = d s and T = d h; with k = d it is the other one's."""
    d = 50
    seen = evidence_of(s, h, h * h / k)
    u = variance.personal_variance(seen, [d]).requires_grad_()
    (d * s / u + k * torch.log1p(u * d * h / k)).sum().backward()
    assert u.grad is not None and abs(u.grad.item()) < 1e-9 * d * s / u.item() ** 2
    even = evidence_of(s, h, h * h / d)
    torch.testing.assert_close(variance.personal_variance(even, [d]), variance.best_variance(even))
    # more directions than there are weights, or less than one, are errors of measurement
    for square, bound in ((1e-9, d), (1e9, 1)):
        odd, at = evidence_of(s, h, h * h * square), evidence_of(s, h, h * h / bound)
        torch.testing.assert_close(
            variance.personal_variance(odd, [d]), variance.personal_variance(at, [d])
        )


@pytest.mark.parametrize("truth", [0.03, 0.3])
def test_it_finds_the_truth_where_few_directions_have_curvature(truth: float) -> None:
    """As above, but the inputs lie in 4 of 40 directions: one v for all of them calls the clients
    much too alike.
    """
    N, n, d, k, noise = 1000, 100, 40, 4, 2.0
    x = torch.zeros(N, n, d, dtype=torch.float64)
    x[..., :k] = normal(N, n, k, seed=1) / noise
    theta = truth**0.5 * normal(N, d, seed=3)
    y = (x @ theta.unsqueeze(-1)).squeeze(-1) + normal(N, n, seed=4)
    H, xy = x.mT @ x, (x.mT @ y.unsqueeze(-1)).squeeze(-1)
    h, square = (
        H.diagonal(dim1=1, dim2=2).mean(),
        (H @ H).diagonal(dim1=1, dim2=2).sum(1).mean() / d**2,
    )
    ends = []
    for best in (variance.best_variance, lambda seen: variance.personal_variance(seen, [d])):
        u, m0 = torch.tensor([1.0], dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
        for _ in range(200):
            m = torch.linalg.solve(H + torch.eye(d) / u, xy + m0 / u)
            m0 = m.mean(0)
            seen = evidence_of((m - m0).square().mean().item(), h.item(), square.item())
            u = best(seen)
        ends.append((u.item(), variance.personal_variance(seen, [d]).item()))
    (rounds, read_off), (alone, _) = ends
    assert alone == pytest.approx(truth, rel=0.15)
    # In a run clients are fitted under the variance of the rounds, which holds them together: the
    # personal one is nearer the truth than that, and low.
    assert rounds < 0.5 * truth and rounds < read_off < 0.75 * truth


def test_the_recorded_objective_is_least_at_the_learned_variance() -> None:
    clients, module = labelled(9, 6, 4, 7, 8), mlp(4, 5, 3)
    algorithm = EmpiricalBayes(update="body", p_do=1.0)
    run = fedhb.fit(
        module,
        clients,
        algorithm,
        rounds=2,
        fraction=1.0,
        batch_size=4,
        local_epochs=6,
        seed=3,
        progress=False,
    )
    server, problem = run.state.server, run.problem
    evidence = Evidence.of(server)
    # clients whose scatter around m0 is the pooled one, in every tensor
    deviation = (evidence.scatter / evidence.answers).sqrt()
    steps = per_weight(deviation, tensor_sizes(problem.network, False))
    m = server["m0"] + torch.stack([steps, -steps])

    def objective(scale: float) -> float:
        return objectives.server_objective(
            algorithm, problem, server | {"V0": scale * server["V0"]}, m
        ).item()

    assert objective(1.0) < min(objective(0.9), objective(1.1))
