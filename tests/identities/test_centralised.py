"""Centralised training: FedAvg with one client, the pooled optimum, and what visiting clients in turn does instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import RNG, examples, labelled, linear, mlp, plan_of, problem_of, regression, seeded
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Arrays, FedAvg, Plan, Problem
from fedhb.algorithms.centralised import Centralised
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import SERVER, Randomness
from fedhb.training.batches import batches

SHUFFLES = ("client", "pooled")
SIZES, D, NOISE, LR = (8, 8, 8, 8), 3, 0.5, 0.2


def batch_normed() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    )


def same_bits(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---- one client


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_one_client_is_fedavg(make: Any, update: str, shuffle: str) -> None:
    module, clients = make(), labelled(11)
    options = {
        "rounds": 3,
        "fraction": 1.0,
        "local_epochs": 2,
        "batch_size": 4,
        "seed": 2,
        "progress": False,
    }
    fedavg = fedhb.fit(module, clients, FedAvg(update=update), **options)
    run = fedhb.fit(module, clients, Centralised(update=update, shuffle=shuffle), **options)
    assert same_bits(run.state.server, fedavg.state.server)
    assert [(r["loss"], r["score"]) for r in run.records] == [
        (r["loss"], r["score"]) for r in fedavg.records
    ]
    x, y = clients.train.x[:6], clients.train.y[:6]
    assert np.array_equal(run.predict(x), fedavg.predict(x))
    assert np.array_equal(
        run.personalise(x, y, lr=0.1).predict(x), fedavg.personalise(x, y, lr=0.1).predict(x)
    )


# ---- linear models with known noise: every loss is quadratic, and every answer known


def quadratic(spread: float = 1.0) -> tuple[Problem, Clients, Tensor, Tensor]:
    """Clients with different coefficients; the Hessians A [N, d, d] and minima w [N, d] of their mean losses."""
    clients = regression(*SIZES, inputs=D, spread=spread)
    pairs = [examples(clients, c) for c in range(len(SIZES))]
    A = torch.stack([x.T @ x / NOISE**2 / len(x) for x, _ in pairs])
    w = torch.stack([torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0] for x, y in pairs])
    return problem_of(linear(D), clients, GaussianRegression(noise=NOISE)), clients, A, w


def pooled_optimum(A: Tensor, w: Tensor) -> Tensor:
    """Of clients of equal size."""
    return torch.linalg.solve(A.sum(0), (A @ w.unsqueeze(2)).sum(0)[:, 0])


def rounds(algorithm: Any, problem: Problem, clients: Clients, plan: Plan, count: int) -> Tensor:
    """theta after some rounds with all clients."""
    server = algorithm.start(problem, RNG)
    for number in range(1, count + 1):
        rng = Randomness(0, number)
        received = algorithm.broadcast(server, clients.ids.tolist())
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, rng)
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
    return server["theta"]


def order_of(number: int) -> list[int]:
    """Who comes when in a round."""
    return torch.randperm(len(SIZES), generator=Randomness(0, number)(SERVER, "turns")).tolist()


def test_pooled_training_reaches_the_optimum_that_fedavg_misses() -> None:
    problem, clients, A, w = quadratic()
    optimum = pooled_optimum(A, w)
    x, y = clients.train.x.double(), clients.train.y.double()
    lstsq = torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0]
    torch.testing.assert_close(
        optimum, lstsq, rtol=0, atol=1e-13
    )  # two exact ways, conditions below 100
    # All examples in one batch: gradient descent, which contracts by the largest |1 - lr (eigenvalue)| < 0.6 in each of 60 steps.
    plan = plan_of(epochs=6, batch_size=32, lr=LR, momentum=0.0)
    assert (1 - LR * torch.linalg.eigvalsh(A.mean(0))).abs().max() < 0.6
    found = rounds(Centralised(shuffle="pooled"), problem, clients, plan, 10)
    torch.testing.assert_close(found, optimum, rtol=0, atol=1e-12)
    # FedAvg's clients have time to find their own optima (0.86^200 = 1e-13), whose mean is where it stays.
    assert (1 - LR * torch.linalg.eigvalsh(A)).abs().max() < 0.86
    own = rounds(FedAvg(), problem, clients, replace(plan, epochs=200), 1)
    torch.testing.assert_close(own, w.mean(0), rtol=0, atol=1e-11)
    assert (own - optimum).norm() > 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epochs", [1, 3])
def test_clients_in_turn_by_hand(epochs: int, momentum: float) -> None:
    """tau steps on a client's whole data, then on the next one's, with a momentum that does not stop between them."""
    problem, clients, A, w = quadratic()
    lr = 0.02
    theta = problem.network.theta.clone()
    for number in (1, 2):
        velocity = torch.zeros_like(theta)
        for c in order_of(number):
            for _ in range(epochs):
                velocity = momentum * velocity + A[c] @ (theta - w[c])
                theta = theta - lr * velocity
    plan = plan_of(epochs=epochs, batch_size=8, lr=lr, momentum=momentum)
    found = rounds(Centralised(update="body", shuffle="client"), problem, clients, plan, 2)
    torch.testing.assert_close(
        found, theta, rtol=0, atol=1e-13
    )  # the same sums in another order, numbers below ten
    assert len({tuple(order_of(number)) for number in range(1, 9)}) > 4  # an order for every round


def test_clients_in_turn_approach_the_pooled_optimum_with_small_steps() -> None:
    problem, clients, A, w = quadratic()
    optimum, gaps = pooled_optimum(A, w), []
    for lr in (0.04, 0.01):
        plan = plan_of(epochs=1, batch_size=8, lr=lr, momentum=0.0)
        # 8 lr a round, 8 being four times the smallest eigenvalue of the mean: of the start exp(-8) is left
        gaps.append(
            (
                rounds(
                    Centralised(update="body", shuffle="client"),
                    problem,
                    clients,
                    plan,
                    int(1 / lr),
                )
                - optimum
            )
            .norm()
            .item()
        )
    # The bias of incremental gradients goes with the step, here a quarter; the order of the last rounds makes it more or less.
    assert gaps[1] < 0.5 * gaps[0] and gaps[1] < 0.05


def test_clients_in_turn_forget_all_but_the_last() -> None:
    """With many epochs, theta is the optimum of whoever came last: how the paper's centralised training fails."""
    problem, clients, _, w = quadratic()
    found = rounds(
        Centralised(update="body", shuffle="client"),
        problem,
        clients,
        plan_of(epochs=150, batch_size=8, lr=LR, momentum=0.0),
        1,
    )
    torch.testing.assert_close(found, w[order_of(1)[-1]], rtol=0, atol=1e-9)  # 0.86^150 = 1e-10


# ---- batches


def numbered() -> Clients:
    """Whose example it is and its number can be read off: x = 100 id + n. The ids are not positions."""
    ids, sizes = [7, 3, 12], [9, 5, 6]
    pairs = [
        ((100.0 * i + np.arange(n)).reshape(-1, 1), np.zeros(n, int))
        for i, n in zip(ids, sizes, strict=True)
    ]
    return Clients.from_arrays(pairs, num_classes=1, ids=ids)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_example_once_an_epoch(shuffle: str) -> None:
    clients, plan = numbered(), plan_of(epochs=2, batch_size=4)
    seen, mixed = [], 0
    for part in Centralised(shuffle=shuffle).turns(clients, RNG):
        for batch in batches(part, plan, RNG):
            x = batch.x[0, :, 0].tolist()
            mixed += len({n // 100 for n in x}) > 1
            seen += x
    assert sorted(seen) == sorted([*clients.train.x[:, 0].tolist()] * 2)
    assert (
        mixed >= 6 if shuffle == "pooled" else mixed == 0
    )  # of ten batches, each of one client with probability below 1/30
    if shuffle == "pooled":
        assert sorted(seen[:20]) == sorted(clients.train.x[:, 0].tolist())  # epoch after epoch


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_order_in_which_participants_are_given_does_not_matter(shuffle: str) -> None:
    clients, algorithm = labelled(9, 6, 4, 7), Centralised(shuffle=shuffle, update="full")
    problem = problem_of(mlp(4, 5, 3), clients)
    server, plan = algorithm.start(problem, RNG), plan_of(epochs=2, train_head=True)
    found, memory = algorithm.local_update(problem, server, clients, {}, plan, RNG)
    again, _ = algorithm.local_update(problem, server, clients.select([2, 0, 3, 1]), {}, plan, RNG)
    other, _ = algorithm.local_update(problem, server, clients, {}, plan, Randomness(0, 2))
    assert (
        same_bits(found, again) and not torch.equal(found["theta"], other["theta"]) and memory == {}
    )
    assert found["theta"].shape == (1, problem.network.num_params) and found[
        "examples"
    ].tolist() == [26.0]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_reports_are_means_over_all_participants(shuffle: str) -> None:
    clients, algorithm = labelled(9, 6, 4), Centralised(shuffle=shuffle)
    problem = problem_of(mlp(4, 5, 3), clients)
    found, _ = algorithm.local_update(
        problem, algorithm.start(problem, RNG), clients, {}, plan_of(epochs=2, lr=1e-300), RNG
    )
    x, y = clients.train.x.double(), clients.train.y
    logits = mlp(4, 5, 3)(x)
    assert found["loss"].item() == pytest.approx(
        nn.functional.cross_entropy(logits, y).item(), rel=1e-12
    )  # sums of 19 numbers
    assert found["score"].item() == pytest.approx(
        (logits.argmax(1) == y).double().mean().item(), rel=1e-12
    )


def test_the_pool_is_augmented_and_spares_batch_norm_single_examples() -> None:
    clients = replace(labelled(5, 1, 4), augment="crop-flip")
    (pool,) = Centralised(shuffle="pooled").turns(clients, RNG)
    assert pool.augment == "crop-flip" and len(pool) == 1 and pool.num_examples == 10
    clients, plan = replace(clients, augment=None), plan_of(batch_size=3)
    problem = problem_of(batch_normed(), clients)
    algorithm = Centralised(shuffle="pooled", update="body")
    server = algorithm.start(problem, RNG)
    found, _ = algorithm.local_update(problem, server, clients, {}, plan, RNG)
    new = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, server, found, RNG), RNG
    )
    # The server takes the result as it is: theta + (found - theta) rounds to found, numbers below ten.
    for key in ("theta", "buffers"):
        torch.testing.assert_close(new[key], found[key][0], rtol=0, atol=1e-15)
        assert not torch.equal(new[key], server[key])
    with pytest.raises(InputError, match="client 1 has a single example"):
        Centralised(update="body", shuffle="client").local_update(
            problem, server, clients, {}, plan, RNG
        )


# ---- runs


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_no_models_are_sent(shuffle: str) -> None:
    options = {"rounds": 2, "fraction": 0.5, "batch_size": 4, "progress": False}
    run = fedhb.fit(
        mlp(4, 5, 3), labelled(9, 6, 4, 7), Centralised(shuffle=shuffle), workers=2, **options
    )
    nothing = {"down_bytes": 0, "up_bytes": 0}
    assert run.result["communication"] == {**nothing, "per_client_round": nothing}
    assert [r["clients"] for r in run.records] == [2, 2]


def test_it_learns_the_digits() -> None:
    clients = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=4, seed=0
    )
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options = {
        "rounds": 10,
        "fraction": 0.5,
        "batch_size": 20,
        "lr": 0.05,
        "personal_epochs": 2,
        "progress": False,
    }
    accuracy = {}
    for shuffle in SHUFFLES:
        result = fedhb.fit(
            model, clients, Centralised(shuffle=shuffle, update="full"), **options
        ).result
        accuracy[shuffle] = result["global"]["accuracy"]
        assert result["personalised"]["accuracy"] > 0.7
    # Chance is 0.1. Half of the clients hold most classes; client after client, the later ones' are remembered better.
    assert accuracy["pooled"] > 0.9 and 0.6 < accuracy["client"] < accuracy["pooled"]
