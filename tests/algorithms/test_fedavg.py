"""FedAvg: the average, the head, personalisation, weight decay."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from problems import RNG, labelled, mlp, plan_of, problem_of
from torch.nn import functional

import fedhb
from fedhb.algorithms import FedAvg, FedBABU


@pytest.mark.parametrize("weighted", [True, False])
def test_the_average_by_hand(weighted: bool) -> None:
    clients, module, lr = labelled(9, 3), mlp(4, 5, 3), 0.1
    problem = problem_of(module, clients)
    algorithm = FedAvg(weighted=weighted)
    server = algorithm.start(problem, RNG)
    plan = plan_of(
        epochs=1, batch_size=9, lr=lr, train_head=True
    )  # one step on all of a client's examples
    found, _ = algorithm.local_update(problem, server, clients, {}, plan, RNG)
    server = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, server, found, RNG), RNG
    )

    # One full step each, averaged by size, is one step on the pooled examples; averaged equally, on
    # the mean of the mean losses.
    module = copy.deepcopy(module)
    x, y = clients.train.x.double(), clients.train.y
    loss = functional.cross_entropy(module(x), y, reduction="none")
    total = loss.mean() if weighted else 0.5 * (loss[:9].mean() + loss[9:].mean())
    gradients = torch.autograd.grad(total, list(module.parameters()))
    expected = torch.cat(
        [
            (p - lr * g).detach().flatten()
            for p, g in zip(module.parameters(), gradients, strict=True)
        ]
    )
    # Means of some numbers below one, in another order.
    torch.testing.assert_close(
        torch.cat([server["theta"], server["head"]]), expected, rtol=0, atol=1e-15
    )
    by_found = found["theta"].T @ torch.tensor(
        [0.75, 0.25] if weighted else [0.5, 0.5], dtype=torch.float64
    )
    torch.testing.assert_close(server["theta"], by_found, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedbabu", "niw", "mixture"])
def test_the_head_moves_only_where_it_is_trained(name: str) -> None:
    clients, plan = labelled(9, 6), plan_of(epochs=2)
    problem = problem_of(mlp(4, 5, 3), clients)
    network, before = problem.network, problem.network.head.clone()
    for update in ("body", "full"):
        algorithm = fedhb.algorithms.build(name, {"update": update})
        server = algorithm.start(problem, RNG)
        received = algorithm.broadcast(server, [0, 1])
        memory = algorithm.remember(problem, clients)
        training = dataclasses.replace(plan, train_head=update == "full")
        found, _ = algorithm.local_update(problem, received, clients, memory, training, RNG)
        after = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, RNG), RNG
        )
        assert ("head" in received) == ("head" in found) == ("head" in after) == (update == "full")
        if update == "full":
            shares = (
                clients.sizes.double()
                if getattr(algorithm, "weighted", False)
                else torch.ones(2, dtype=torch.float64)
            )
            mean = shares @ found["head"] / shares.sum()
            torch.testing.assert_close(
                after["head"], mean, rtol=0, atol=1e-15
            )  # a mean of two, in another order
            assert (after["head"] - before).abs().max() > 1e-3
        assert torch.equal(network.head, before)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "fedbabu", "empirical-bayes", "niw", "mixture"]
)
@pytest.mark.parametrize("update", ["body", "full"])
def test_personalisation_trains_body_and_head(name: str, update: str) -> None:
    clients = labelled(9, 6)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = fedhb.algorithms.build(
        name, {"update": update, **({"kl_weight": 0.1} if name == "empirical-bayes" else {})}
    )
    server = algorithm.start(problem, RNG)
    plan = plan_of(epochs=3, train_head=True)
    mine = algorithm.personalise(
        problem, server, clients, algorithm.remember(problem, clients), plan, RNG
    )
    assert mine.theta.shape[:2] == mine.head.shape[:2] == (2, 1)
    for value, start in ((mine.theta, problem.network.theta), (mine.head, problem.network.head)):
        assert ((value[:, 0] - start).abs().amax(1) > 1e-3).all()
    assert not torch.equal(mine.head[0], mine.head[1])


@pytest.mark.parametrize("update", ["body", "full"])
def test_weight_decay_shrinks_what_is_sent_after_every_step(update: str) -> None:
    """One step without momentum: (w - lr g) / (1 + lr weight_decay), of body and head where both
    are sent.
    """
    options: Any = {
        "rounds": 1,
        "fraction": 1.0,
        "batch_size": 8,
        "lr": 0.2,
        "momentum": 0.0,
        "schedule": "constant",
    }
    module, clients = mlp(4, 5, 3), labelled(8, 8)
    plain, decayed = (
        fedhb.fit(
            module, clients, FedBABU(update=update, weight_decay=decay), progress=False, **options
        ).state.server
        for decay in (0.0, 0.5)
    )
    assert plain.keys() == decayed.keys() == ({"theta", "head"} if update == "full" else {"theta"})
    for key, value in plain.items():
        torch.testing.assert_close(decayed[key], value / 1.1, rtol=1e-12, atol=1e-14)
