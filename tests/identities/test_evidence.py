"""The prior's variance by empirical Bayes: the best u and v by autograd, the curvature's estimate,
a truth found again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import initial, labelled, mlp, normal, plan_of
from torch import Tensor

import fedhb
from fedhb.algorithms import NIW, Federation, Problem
from fedhb.algorithms.empirical_bayes import variances
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness


def measure(problem: Problem, weights: Weights, *rest: Any) -> Tensor:
    """Return the measurements of clients that found these weights."""
    return variances.measure(
        problem, {"m": weights.theta, "head": weights.head}, weights, *rest, None
    )


def seen_of(s: float, h: float, clients: float = 7.0) -> Tensor:
    return torch.tensor([[clients], [clients * s], [2.0], [2.0 * h]], dtype=torch.float64)


@pytest.mark.parametrize(("s", "h"), [(1e-6, 0.1), (0.3, 2.0), (5.0, 1e3), (1e-3, 1e-4)])
def test_u_and_v_minimise_the_objective(s: float, h: float) -> None:
    seen = seen_of(s, h)
    u = variances.best_variance(seen).requires_grad_()
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
        0.5 * s / u.item() + variances.occam(u.detach(), seen, [1]).item(), rel=1e-12
    )


def test_limits() -> None:
    assert variances.best_variance(seen_of(0.3, 1e12)).item() == pytest.approx(
        0.3, rel=1e-6
    )  # data say all: the scatter itself
    assert variances.best_variance(seen_of(1e-10, 0.1)).item() == pytest.approx(
        (1e-10 / 0.1) ** 0.5, rel=1e-3
    )
    assert 0 < variances.best_variance(seen_of(0.0, 0.0)).item() < float("inf")


def test_curvature_is_the_fisher_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean over many draws of batches and targets, against the sum over classes of p |gradient|^2."""
    monkeypatch.setattr(variances, "MEASURED", 1.0)
    clients, network = labelled(40, 24), Network(mlp(4, 5, 3))
    problem = Problem(network, Categorical(3), Federation(2, 64, 3))
    weights, plan = initial(network, 2), dataclasses.replace(plan_of(1, 8), train_head=True)
    draws = torch.stack(
        [measure(problem, weights, clients, plan, Randomness(0, r))[:, 2:10] for r in range(3000)]
    ).double()
    found, error = draws.mean(0), draws.std(0) / 3000**0.5
    counts = variances.layer_sizes(network, True)
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
                else variances.best_variance(seen_of(s.item(), h.item()))
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
    seen = torch.cat([seen_of(s, h), torch.tensor([[2.0 * h * h / k]], dtype=torch.float64)])
    u = variances.personal_variance(seen, [d]).requires_grad_()
    (d * s / u + k * torch.log1p(u * d * h / k)).sum().backward()
    assert u.grad is not None and abs(u.grad.item()) < 1e-9 * d * s / u.item() ** 2
    even = torch.cat([seen_of(s, h), torch.tensor([[2.0 * h * h / d]], dtype=torch.float64)])
    torch.testing.assert_close(
        variances.personal_variance(even, [d]), variances.best_variance(even)
    )
    # more directions than there are weights, or less than one, are errors of measurement
    for square, bound in ((1e-9, d), (1e9, 1)):
        odd = torch.cat(
            [seen_of(s, h), torch.tensor([[2.0 * h * h * square]], dtype=torch.float64)]
        )
        at = torch.cat([seen_of(s, h), torch.tensor([[2.0 * h * h / bound]], dtype=torch.float64)])
        torch.testing.assert_close(
            variances.personal_variance(odd, [d]), variances.personal_variance(at, [d])
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
    for best in (variances.best_variance, lambda seen: variances.personal_variance(seen, [d])):
        u, m0 = torch.tensor([1.0], dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
        for _ in range(200):
            m = torch.linalg.solve(H + torch.eye(d) / u, xy + m0 / u)
            m0 = m.mean(0)
            row = torch.stack([2.0 * square]).view(1, 1)
            seen = torch.cat([seen_of((m - m0).square().mean().item(), h.item()), row])
            u = best(seen)
        ends.append((u.item(), variances.personal_variance(seen, [d]).item()))
    (rounds, read_off), (alone, _) = ends
    assert alone == pytest.approx(truth, rel=0.15)
    # NIW's clients are fitted under the variance of the rounds, which holds them together: nearer
    # the truth than it, and low
    assert rounds < 0.5 * truth and rounds < read_off < 0.75 * truth


def test_the_recorded_objective_is_least_at_the_learned_variance() -> None:
    clients, module = labelled(9, 6, 4, 7, 8), mlp(4, 5, 3)
    algorithm = NIW(update="body", p_do=1.0)
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
    count, scatter = server["evidence"][:2]
    # clients whose scatter around m0 is the pooled one, in every layer
    steps = variances.spread(
        (scatter / count).sqrt(), variances.layer_sizes(problem.network, False)
    )
    m = server["m0"] + torch.stack([steps, -steps])

    def objective(scale: float) -> float:
        return algorithm.server_objective(problem, server | {"V0": scale * server["V0"]}, m).item()

    assert objective(1.0) < min(objective(0.9), objective(1.1))
