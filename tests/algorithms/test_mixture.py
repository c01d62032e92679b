"""Mixture: prototypes that coincide, die and start again; predictions."""

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
from scattered_clients import D, K, N, c_by_hand, scattered, server_of, server_problem
from torch import Tensor

import fedhb
from fedhb.algorithms import Mixture
from fedhb.algorithms.toolbox import answer_bytes, num_bytes
from fedhb.clients.clients import Clients


def test_one_prototype_sends_no_gate() -> None:
    clients = labelled(9, 6)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of()
    d = 8 * problem.network.num_params  # bytes
    for count, down, up in ((1, d, d), (2, 3 * d, 2 * d), (3, 4 * d, 2 * d)):
        algorithm = mixture(num_prototypes=count)
        received = algorithm.broadcast(algorithm.start(problem, RNG), [0, 1])
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
        assert ("beta" in received) == ("beta" in found) == (count > 1)
        assert (num_bytes(received), answer_bytes(algorithm, found) // len(clients)) == (down, up)


def test_far_prototypes_leave_everything_finite() -> None:
    problem, m = server_problem(), scattered(4)
    direction = normal(2, D, seed=6)
    r = (
        1e6
        * direction
        / direction.norm(dim=1, keepdim=True)
        * torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    )
    algorithm, received = mixture(num_prototypes=2, sigma2=0.1), {"r": r}
    m = m.requires_grad_()
    kl = algorithm.kl(problem, received, m)
    # The nearer prototype alone: its distance squared over 2 sigma2, 5e12.
    torch.testing.assert_close(
        kl, (m - r[0]).square().sum(1) / 0.2 + math.log(2), rtol=1e-14, atol=0
    )
    (gradient,) = torch.autograd.grad(kl.sum(), m)
    torch.testing.assert_close(gradient, (m - r[0]) / 0.1, rtol=1e-14, atol=0)
    with torch.no_grad():
        target = algorithm.pull(problem, received, torch.full((4,), 5)).towards(m)
        assert torch.equal(target, r[:1].expand(4, D))
        after = aggregate(algorithm, problem, server_of(r), m.detach())["r"]
    # The old r is a million away: its last digits are lost in the sum of differences (1e-10), and
    # nothing else.
    torch.testing.assert_close(after[0], m.detach().mean(0) / (0.1 / N + 1), rtol=0, atol=1e-9)
    assert torch.equal(after[1], r[1])


def two_groups(clients_each: int = 4, size: int = 24) -> Clients:
    """Two groups of clients that disagree: where one says class 0, the other says 1."""
    random = np.random.default_rng(0)
    pairs = []
    for k in range(2 * clients_each):
        x = random.normal(size=(size, 4))
        pairs.append((x, ((x[:, 0] > 0) ^ (k < clients_each)).astype(np.int64)))
    return Clients.from_arrays(pairs)


def test_equal_prototypes_stay_equal() -> None:
    clients = two_groups()
    problem, plan = problem_of(mlp(4, 6, 2), clients), plan_of(epochs=2, batch_size=8)
    algorithm = mixture(num_prototypes=2, noise=0.0)
    server = algorithm.start(problem, RNG)
    for _ in range(3):
        received = algorithm.broadcast(server, range(8))
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
        summary = algorithm.summarise(problem, received, found, RNG)
        server = algorithm.aggregate(problem, server, summary, RNG)
        assert torch.equal(server["r"][0], server["r"][1])
    assert not torch.equal(server["r"][0], problem.network.theta)


def test_the_default_start_separates_two_groups() -> None:
    clients, algorithm = two_groups(), Mixture(num_prototypes=2)
    options = {
        "fraction": 1.0,
        "local_epochs": 4,
        "batch_size": 8,
        "schedule": "constant",
        "progress": False,
    }
    run = fedhb.fit(mlp(4, 6, 2), clients, algorithm, rounds=12, **options)
    start, server = algorithm.start(run.problem, RNG)["r"], run.state.server
    assert (server["r"][0] - server["r"][1]).norm() > 100 * (start[0] - start[1]).norm()
    # Each group has a prototype of its own.
    found, _ = algorithm.local_update(
        run.problem, server, clients, {}, plan_of(epochs=4, batch_size=8), RNG
    )
    nearest = torch.cdist(found["m"], server["r"]).argmin(1).tolist()
    assert nearest in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


def test_a_dead_prototype_waits_and_starts_again_beside_the_most_used() -> None:
    problem, m = server_problem(), scattered()
    algorithm = mixture(num_prototypes=K, sigma2=0.01, patience=2, noise=1e-3)
    r = torch.stack([m[0], m[1], torch.full((D,), 50.0, dtype=torch.float64)])
    server = server_of(r)
    for waited in (1, 2):
        server = aggregate(algorithm, problem, server, m)
        assert torch.equal(server["r"][2], r[2])
        assert server["idle"].tolist() == [0, 0, waited]
    used = c_by_hand(m, server["r"][:2], sigma2=0.01).sum(0).argmax()
    server = aggregate(algorithm, problem, server, m)
    assert server["idle"].tolist() == [0, 0, 0]
    away = server["r"][2] - server["r"][used]
    assert 0 < away.norm() < 5e-3 and server["r"].isfinite().all()  # four numbers of deviation 1e-3
    assert not torch.equal(server["r"][used], r[used])  # the others took their step


def test_a_prototype_that_starts_again_has_the_buffers_of_the_one_beside_it() -> None:
    m, algorithm = scattered(), mixture(num_prototypes=2, sigma2=0.01, patience=0, noise=1e-3)
    r = torch.stack([m.mean(0), torch.full((D,), 50.0, dtype=torch.float64)])
    server = server_of(r) | {"buffers": torch.tensor([[1.0], [7.0]], dtype=torch.float64)}
    found = {
        "m": m,
        "buffers": torch.full((N, 1), 2.5, dtype=torch.float64),
        "examples": torch.full((N,), 5.0).double(),
    }
    summary = algorithm.summarise(
        server_problem(), algorithm.broadcast(server, range(N)), found, RNG
    )
    new = algorithm.aggregate(server_problem(), server, summary, RNG)
    assert (new["r"][1] - new["r"][0]).norm() < 1e-2
    torch.testing.assert_close(
        new["buffers"], torch.full((2, 1), 2.5, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_a_round_records_how_many_prototypes_are_at_work() -> None:
    """exp of the entropy of the clients' shares, which sum to one, for any number of clients."""
    algorithm, m = mixture(num_prototypes=K, sigma2=1e-3), normal(K, D, seed=1)
    for clients, effective in (([0, 1, 2] * 2, 3.0), ([0, 1] * 4, 2.0), ([2] * 5, 1.0)):
        found = {"m": m[clients], "examples": torch.ones(len(clients), dtype=torch.float64)}
        found |= {
            key: torch.zeros(len(clients), dtype=torch.float64) for key in ("loss", "score", "kl")
        }
        problem, server = server_problem(), server_of(m)
        record = algorithm.report(problem, server, algorithm.summarise(problem, server, found, RNG))
        assert sum(record["responsibilities"]) == pytest.approx(1.0)
        assert record["effective_prototypes"] == pytest.approx(effective, rel=1e-6)


def test_prediction_mixes_probabilities_by_the_gate() -> None:
    module, x = mlp(4, 5, 3), normal(6, 4, seed=2)
    problem = problem_of(module, labelled(9, 6))
    algorithm = mixture(num_prototypes=2, noise=1.0)
    server = algorithm.start(problem, RNG) | {"beta": normal(problem.network.num_params, seed=4)}

    def outputs(body: Tensor, head: Tensor) -> Tensor:
        first, second = body[:20].view(5, 4), body[20:]
        return (
            torch.tanh(x @ first.T + second) @ head[: -(len(head) // 6)].view(-1, 5).T
            + head[-(len(head) // 6) :]
        )

    g = outputs(server["beta"], problem.network.gate(2).head).softmax(1)
    by_prototype = [outputs(r_j, problem.network.head).softmax(1) for r_j in server["r"]]
    expected = g[:, :1] * by_prototype[0] + g[:, 1:] * by_prototype[1]
    found = algorithm.predict(problem, server, x, RNG)
    # Products and sums of a few numbers near one.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (g[:, 0] - 0.5).abs().max() > 0.1 and (
        by_prototype[0] - by_prototype[1]
    ).abs().max() > 0.1
    alone = mixture(num_prototypes=1).predict(problem, {"r": server["r"][:1]}, x, RNG)
    torch.testing.assert_close(alone, by_prototype[0], rtol=0, atol=1e-14)


def test_the_printed_constants_are_keywords_of_fit() -> None:
    printed = Mixture.as_printed()
    algorithm = printed.pop("algorithm")
    assert algorithm == Mixture(
        update="body", kl_weight=1.0, num_prototypes=2, sigma2=0.1, shrink=True
    )
    options = {"rounds": 1, "fraction": 1.0, "progress": False}
    run = fedhb.fit(mlp(4, 5, 3), labelled(9, 6), algorithm, **printed, **options)
    assert run.personal_plan.epochs == 5 and run.records[0]["lr"] == 0.1
