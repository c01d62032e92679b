"""FedEM: what a round does, who predicts with what, and learners that begin differently."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from problems import RNG, batch_normed, labelled, linear, mlp, normal, plan_of, problem_of, seeded
from torch import Tensor, nn
from torch.nn import functional

import fedhb
from fedhb.algorithms import Arrays, Problem
from fedhb.algorithms.fedem import FedEM, losses
from fedhb.algorithms.several_networks import different_starts, learner_of
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.seeding import Randomness
from fedhb.training.batches import batches


def own_module(problem: Problem, arrays: Arrays) -> nn.Module:
    """A copy of the problem's module with the weights of one learner; the head is the initial one
    where it is not shared.
    """
    module = copy.deepcopy(problem.network.module)
    head = arrays.get("head", problem.network.head)
    nn.utils.vector_to_parameters(
        torch.cat([arrays["theta"], head]), module.parameters()
    )  # the head comes last
    return module.eval()


def test_losses_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = labelled(11)
    problem = problem_of(batch_normed(), clients)
    server = FedEM().start(problem, RNG)
    learners = Weights(server["theta"], problem.network.head.expand(3, -1), server["buffers"])
    whole = losses(problem, learners, *clients.train.examples(0))
    monkeypatch.setattr("fedhb.algorithms.fedem.EXAMPLES_AT_ONCE", 4)
    # The same products, perhaps summed in another order.
    torch.testing.assert_close(
        losses(problem, learners, *clients.train.examples(0)), whole, rtol=0, atol=1e-14
    )


def test_batches_say_which_examples_they_hold() -> None:
    clients = labelled(9, 6, 2, 5).select([2, 0, 3])
    for batch in batches(clients, plan_of(epochs=2), RNG):
        rows = clients.train.rows[batch.held]
        assert torch.equal(clients.train.x[rows], batch.x) and torch.equal(
            clients.train.y[rows], batch.y
        )


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_each_learner_is_trained_on_its_share_of_every_example(order: list[int]) -> None:
    """Against torch's own optimiser, on losses weighted by a function of x: weights that were not
    shuffled along would differ.
    """
    clients, plan = labelled(9, 6, 3).select(order), plan_of(epochs=3, train_head=True)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedEM(num_learners=2, update="full")
    received = algorithm.broadcast(algorithm.start(problem, RNG), [])

    def share(x: Tensor) -> Tensor:
        return torch.sigmoid(3.0 * x.double().sum(-1))

    first = share(clients.train.x[clients.train.rows])
    found, _ = algorithm.m_step(
        problem, received, clients, torch.stack([first, 1.0 - first]), plan, RNG
    )
    for c in range(3):
        for k in range(2):
            module = own_module(problem, learner_of(received, k))
            optimiser = torch.optim.SGD(module.parameters(), lr=plan.lr, momentum=plan.momentum)
            for batch in batches(clients.select([c]), plan, RNG):
                x, y = batch.x[0].double(), batch.y[0]
                weight = share(x) if k == 0 else 1.0 - share(x)
                optimiser.zero_grad()
                (
                    weight * functional.cross_entropy(module(x), y, reduction="none")
                ).mean().backward()
                optimiser.step()
            expected = torch.cat([p.detach().flatten() for p in module.parameters()])
            # Nine steps or fewer, sums in another order.
            torch.testing.assert_close(
                torch.cat([found.theta[c, k], found.head[c, k]]), expected, rtol=0, atol=1e-13
            )


def test_the_round_by_hand() -> None:
    """The answer of a client is its M-step after its E-step from its own pi; the server averages
    participants alone, by size.
    """
    clients, plan = labelled(9, 6, 3), plan_of(epochs=2)
    problem = problem_of(batch_normed(), clients)
    algorithm = FedEM(update="body")
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, [0, 1, 2])
    assert received.keys() == {"theta", "buffers"}
    memory = algorithm.remember(problem, clients)
    assert (
        torch.equal(memory["pi"], torch.full((3, 3), 1 / 3, dtype=torch.float64))
        and not memory["seen"].any()
    )
    memory["pi"][1] = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    cohort = [0, 1]
    part = {key: value[cohort] for key, value in memory.items()}
    found, remembered = algorithm.local_update(
        problem, received, clients.select(cohort), part, plan, RNG
    )
    q, pi = algorithm.e_step(problem, received, clients.select(cohort), part["pi"])
    weights, reports = algorithm.m_step(problem, received, clients.select(cohort), q, plan, RNG)
    for key in ("loss", "score"):  # of a client: its learners' mean under pi
        torch.testing.assert_close(
            found[key], torch.einsum("ck,ck->c", pi, reports[key]), rtol=0, atol=1e-15
        )
    assert (
        torch.equal(remembered["pi"], pi)
        and remembered["seen"].all()
        and torch.equal(found["pi"], pi)
    )
    assert torch.equal(found["theta"], weights.theta) and torch.equal(
        found["buffers"], weights.buffers
    )
    after = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, received, found, RNG), RNG
    )
    shares = torch.tensor([0.6, 0.4], dtype=torch.float64)  # of nine and six examples
    for key in ("theta", "buffers", "pi"):
        # A mean of two numbers near one, in another order.
        torch.testing.assert_close(
            after[key], torch.tensordot(shares, found[key], 1), rtol=0, atol=1e-15
        )
    assert ((after["theta"] - server["theta"]).abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("update", ["body", "full"])
def test_prediction_mixes_probabilities_by_the_clients_pi(update: str) -> None:
    clients, x = labelled(9, 6), normal(7, 4, seed=1)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedEM(update=update)
    server = algorithm.start(problem, RNG) | {
        "pi": torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    }
    own = torch.tensor([[0.1, 0.1, 0.8]], dtype=torch.float64)
    each = torch.stack(
        [own_module(problem, learner_of(server, k))(x).softmax(-1).detach() for k in range(3)]
    )

    def expected(pi: Tensor) -> Tensor:
        return torch.einsum("k,kno->no", pi, each)

    seen = {"pi": own, "seen": torch.ones(1, 1, dtype=torch.float64)}
    new = algorithm.remember(problem, clients.select([0]))
    for memory, pi in ((None, server["pi"]), (new, server["pi"]), (seen, own[0])):
        # Products of numbers below one, in another order.
        torch.testing.assert_close(
            algorithm.predict(problem, server, x, RNG, memory), expected(pi), rtol=0, atol=1e-14
        )


@pytest.mark.parametrize("update", ["body", "full"])
def test_personalisation_is_the_client_update_with_the_head(update: str) -> None:
    clients, plan = labelled(9, 6), plan_of(epochs=3, train_head=True)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedEM(update=update, pi_steps=1)
    server = algorithm.start(problem, RNG)
    memory = algorithm.remember(problem, clients)
    mine = algorithm.personalise(problem, server, clients, memory, plan, RNG)
    found, remembered = algorithm.local_update(
        problem, algorithm.broadcast(server, [0, 1]), clients, memory, plan, RNG
    )
    assert torch.equal(mine.theta, found["theta"]) and torch.equal(mine.weights, remembered["pi"])
    start = server.get("head", problem.network.head.expand(3, -1))
    assert ((mine.head - start).abs().amax(2) > 1e-3).all() and mine.head.shape == (
        2,
        3,
        len(problem.network.head),
    )
    weights = dataclasses.replace(algorithm, tune=False).personalise(
        problem, server, clients, memory, plan, RNG
    )
    assert torch.equal(weights.theta, server["theta"].expand(2, 3, -1)) and torch.equal(
        weights.head, start.expand(2, 3, -1)
    )
    assert torch.equal(weights.weights, mine.weights) and not torch.equal(
        weights.weights[0], weights.weights[1]
    )
    known = algorithm.personalise(problem, server, clients, remembered, plan, RNG)
    assert not torch.allclose(known.weights, mine.weights)  # it begins at the client's own pi


def test_learners_begin_as_different_networks_of_the_same_kind() -> None:
    problem = problem_of(batch_normed(), labelled(9))
    network = problem.network
    three, two = (different_starts(problem, count, "full", 0.0, RNG) for count in (3, 2))
    for key, slots, vector in (
        ("theta", network.body_slots, network.theta),
        ("head", network.head_slots, network.head),
    ):
        assert torch.equal(three[key][0], vector) and torch.equal(three[key][:2], two[key])
        for slot in slots:
            entries = slot.of(three[key]).flatten(1)
            assert torch.equal(
                entries.sort(1).values, entries[:1].sort(1).values.expand(3, -1)
            )  # each tensor has its own
            # The norm's weight is one and its bias zero in all of them; no other tensor is as
            # before.
            same = slot.name in ("1.weight", "1.bias")
            assert (
                all(torch.equal(entries[k], entries[0]) == same for k in (1, 2))
                or len(entries[0]) < 4
            )
    assert torch.equal(three["buffers"], network.buffers.expand(3, -1))
    assert not torch.equal(three["theta"][1], three["theta"][2])
    body = different_starts(problem, 2, "body", 0.0, RNG)
    assert body.keys() == {"theta", "buffers"} and torch.equal(body["theta"], two["theta"])
    other = different_starts(problem, 2, "full", 0.0, Randomness(1))
    assert not torch.equal(other["theta"][1], two["theta"][1])

    noisy = different_starts(problem, 3, "full", 0.01, RNG)
    assert torch.equal(noisy["theta"][0], network.theta)
    noise = torch.cat([noisy["theta"][1:], noisy["head"][1:]], 1) - torch.cat(
        [network.theta, network.head]
    )
    assert noise.std().item() == pytest.approx(0.01, rel=0.25)  # of 126 draws: four standard errors


def test_equal_learners_are_refused() -> None:
    module = linear(3)
    nn.init.zeros_(
        module.weight
    )  # a start that is right for a regression, and wrong for a mixture of them
    problem = problem_of(module, labelled(9, shape=(3,)))
    with pytest.raises(fedhb.InputError, match=r"fedem\.noise"):
        FedEM(num_learners=2, noise=0.0).start(problem, RNG)
    assert len(FedEM(num_learners=2, noise=0.01).start(problem, RNG)["theta"].unique(dim=0)) == 2
    assert torch.equal(
        FedEM(num_learners=1).start(problem, RNG)["theta"], torch.zeros(1, 3, dtype=torch.float64)
    )


def test_it_tells_two_kinds_of_clients_apart() -> None:
    """Digits of which every second client calls y what the others call 9 - y: no single network is
    right more than half of the time, over all clients.
    """
    digits, pairs = fedhb.data.load("digits"), []
    for part in (digits.train, digits.test):
        order = np.random.default_rng(0).permutation(len(part))
        rows = [order[k::8] for k in range(8)]
        pairs.append(
            [(part.x[r], 9 - part.y[r] if k % 2 else part.y[r]) for k, r in enumerate(rows)]
        )
    clients = Clients.from_arrays(*pairs, num_classes=10, standardise=True)
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options: dict[str, Any] = {
        "rounds": 15,
        "fraction": 0.5,
        "local_epochs": 3,
        "batch_size": 20,
        "personal_epochs": 1,
    }
    run = fedhb.fit(
        module, clients, FedEM(num_learners=2, update="full", noise=0.0), progress=False, **options
    )
    assert run.result["global"]["accuracy"] > 0.75  # 0.5 at best for one network
    pi = torch.stack([run.state.store.memories[k]["pi"] for k in range(8)])
    assert len(set(pi[0::2].argmax(1).tolist())) == 1 and len(set(pi[1::2].argmax(1).tolist())) == 1
    assert pi[0].argmax() != pi[1].argmax() and pi.amax(1).min() > 0.75
    assert 1.8 < run.records[-1]["effective_learners"] <= 2.0 + 1e-6
