"""FedPop: which heads are kept, where clients begin, and who predicts with what."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    initial,
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
from torch.nn import functional

import fedhb
from fedhb.algorithms.fedpop import FedPop
from fedhb.algorithms.toolbox import answer_bytes, num_bytes
from fedhb.clients.clients import Clients
from fedhb.errors import InputError


def test_the_chain_differentiates_nothing_below_the_head() -> None:
    """A chain has more steps than the body's training: each must cost a forward pass, not a forward
    and a backward pass.
    """
    clients = labelled(8, 8)
    problem = problem_of(batch_normed(), clients)
    seen: list[bool] = []
    problem.network.module[1].register_forward_hook(
        lambda module, inputs, output: seen.append(output.requires_grad)
    )
    start = initial(problem.network, 2)
    FedPop(head_epochs=2).chain(
        problem, start, problem.network.head, clients, plan_of(batch_size=4, lr=0.1), RNG
    )
    assert seen and not any(seen)


def test_which_iterates_are_kept() -> None:
    """Clients of three, two and one batches an epoch; the same noise whatever is kept."""
    clients = labelled(11, 8, 3)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of(batch_size=4)
    start = initial(problem.network, 3)

    def kept(**options: float) -> Tensor:
        return FedPop(**({"head_epochs": 4} | options)).chain(
            problem, start, problem.network.head, clients, plan, RNG
        )  # type: ignore[arg-type]

    for c, length in enumerate((12, 8, 4)):
        every = kept(burn_in=0.0, num_heads=length)[c]  # iterates 1 to `length`
        assert len(every.unique(dim=0)) == length
        half = kept(burn_in=0.5, num_heads=2)[c]  # of the second half, the middle one and the last
        assert torch.equal(half, every[[3 * length // 4 - 1, length - 1]])
        last = kept(burn_in=1.0, num_heads=3)[c]
        assert torch.equal(last, every[[-1, -1, -1]])
    short = kept(
        head_epochs=1, burn_in=0.0, num_heads=4
    )  # fewer iterates than places: some are kept twice
    assert [len(heads.unique(dim=0)) for heads in short] == [3, 2, 1]


def test_batch_norm_joins_single_examples_in_the_chain_too() -> None:
    """Nine examples in batches of four are two batches there: five and four.

    The last iterate is kept last.
    """
    clients = labelled(9, 4)
    problem = problem_of(batch_normed(), clients)
    algorithm = FedPop(head_epochs=3, num_heads=6, burn_in=0.0)
    start = initial(problem.network, 2)
    before = start.buffers.clone()
    heads = algorithm.chain(problem, start, problem.network.head, clients, plan_of(), RNG)
    assert [len(each.unique(dim=0)) for each in heads] == [6, 3]
    assert torch.equal(
        start.buffers, before
    )  # the body's own passes update the buffers that are sent


def test_the_body_descends_under_kept_heads_each_as_likely() -> None:
    """Sixty clients with the same examples, one full batch: each one's step is that under one of
    its own kept heads.
    """
    x, y = arrays = (np.random.default_rng(0).normal(size=(5, 4)), np.array([0, 1, 2, 0, 1]))
    clients, module, kept, lr = (
        Clients.from_arrays([arrays] * 60, num_classes=3),
        mlp(4, 5, 3),
        3,
        0.1,
    )
    problem = problem_of(module, clients)
    algorithm = FedPop(prior_scale=1.0, head_epochs=6, num_heads=kept)
    server = algorithm.start(problem, RNG)
    found, memory = algorithm.local_update(
        problem,
        server,
        clients,
        algorithm.remember(problem, clients),
        plan_of(batch_size=5, lr=lr, momentum=0.0),
        RNG,
    )
    module = copy.deepcopy(module)
    picked = []
    for c in range(60):
        matches = []
        for m in range(kept):
            nn.utils.vector_to_parameters(memory["heads"][c, m], module[-1].parameters())
            inputs = torch.from_numpy(x).float().double()  # as stored
            loss = functional.cross_entropy(module(inputs), torch.from_numpy(y))
            gradient = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(module[0].parameters()))]
            )
            # A mean of five, in another order.
            matches.append(
                torch.allclose(
                    found["theta"][c], server["theta"] - lr * gradient, rtol=0, atol=1e-14
                )
            )
        assert sum(matches) == 1
        picked.append(matches.index(True))
    # Twenty each are expected, with a deviation of 3.7.
    assert all(6 <= picked.count(m) <= 34 for m in range(kept))


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_body_is_sent_and_the_mean_of_the_heads_where_it_is_learnt(update: str) -> None:
    clients = labelled(9, 3)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedPop(update=update)
    server, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    found, memory = algorithm.local_update(
        problem, server, clients, memory, plan_of(train_head=update == "full"), RNG
    )
    new = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, server, found, RNG), RNG
    )
    d, h = problem.network.num_params, len(problem.network.head)
    assert num_bytes(algorithm.broadcast(server, [0, 1])) == 8 * (d if update == "body" else d + h)
    assert answer_bytes(algorithm, found) == 2 * 8 * (d if update == "body" else d + h)
    shares = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(
        new["theta"], shares @ found["theta"], rtol=0, atol=1e-15
    )  # a mean of two, in another order
    assert ("head" in found) == ("head" in new) == (update == "full")
    if update == "full":
        torch.testing.assert_close(
            new["head"], shares @ memory["heads"].mean(1), rtol=0, atol=1e-15
        )
        assert (new["head"] - server["head"]).abs().max() > 1e-3


def test_clients_begin_at_their_own_last_head_or_at_the_populations_mean() -> None:
    clients = labelled(9, 6)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedPop(update="full", num_heads=2)
    server = algorithm.start(problem, RNG)
    server["head"] = server["head"] + 0.3  # learnt: no longer the initial head
    memory = algorithm.remember(problem, clients)
    memory["heads"] += normal(*memory["heads"].shape, seed=1)
    memory["seen"][0] = (
        1.0  # the second client never took part: what its memory holds does not count
    )
    _, after = algorithm.local_update(problem, server, clients, memory, plan_of(lr=1e-300), RNG)
    # Noise of a step this small is 1e-150, and the prior's pull 1e-298.
    assert torch.equal(after["heads"][0], memory["heads"][0, [-1, -1]])
    assert torch.equal(after["heads"][1], server["head"].expand(2, -1))
    assert after["seen"].tolist() == [[1.0], [1.0]]


def test_the_prior_is_around_the_mean_that_was_sent() -> None:
    clients = labelled(9, 6)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = FedPop(update="full", prior_scale=1e-6)
    server = algorithm.start(problem, RNG)
    server["head"] = server["head"] + 0.3
    memory = algorithm.remember(problem, clients)
    memory["seen"] += 1.0  # they begin at the initial head
    _, after = algorithm.local_update(problem, server, clients, memory, plan_of(), RNG)
    torch.testing.assert_close(
        after["heads"], server["head"].expand(2, 5, -1), rtol=0, atol=1e-5
    )  # a few prior scales


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(InputError, match=r"fedpop.*head"):
        FedPop().start(problem_of(linear(3), regression(4)), RNG)


@pytest.mark.parametrize("update", ["body", "full"])
def test_a_client_predicts_with_its_own_heads_and_others_with_the_mean(update: str) -> None:
    module, clients, x = mlp(4, 5, 3), labelled(9, 6), normal(6, 4, seed=2)
    problem = problem_of(module, clients)
    algorithm = FedPop(update=update, prior_scale=1.0, num_heads=3)
    server = algorithm.start(problem, RNG)
    server["theta"] = server["theta"] + 0.1
    if update == "full":
        server["head"] = server["head"] + 0.3 * normal(len(server["head"]), seed=1)

    def by_hand(theta: Tensor, head: Tensor) -> Tensor:
        net = copy.deepcopy(module)
        nn.utils.vector_to_parameters(torch.cat([theta, head]), net.parameters())
        return net(x).softmax(-1).detach()

    fresh = algorithm.remember(problem, clients.select([0]))
    population = by_hand(server["theta"], server.get("head", problem.network.head))
    for memory in (None, fresh):
        # Products in another order, here and below.
        torch.testing.assert_close(
            algorithm.predict(problem, server, x, RNG, memory), population, rtol=0, atol=1e-14
        )
    heads = normal(1, 3, len(problem.network.head), seed=3)
    own = algorithm.predict(problem, server, x, RNG, {"heads": heads, "seen": torch.ones(1, 1)})
    expected = torch.stack([by_hand(server["theta"], head) for head in heads[0]]).mean(0)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-14)
    assert (own - population).abs().max() > 0.1


@pytest.mark.parametrize("update", ["body", "full"])
def test_personalisation_is_the_client_update(update: str) -> None:
    clients, x = labelled(9, 6), normal(2, 6, 4, seed=2)
    problem = problem_of(batch_normed(), clients)
    algorithm = FedPop(update=update, num_heads=3)
    server = algorithm.start(problem, RNG)
    memory = algorithm.remember(problem, clients)
    memory["seen"][0] = 1.0
    memory["heads"][0] += 0.2
    plan = plan_of(epochs=2, train_head=True)
    mine = algorithm.personalise(problem, server, clients, memory, plan, RNG)
    found, after = algorithm.local_update(problem, server, clients, memory, plan, RNG)
    assert torch.equal(mine.head, after["heads"])
    for m in range(3):
        assert torch.equal(mine.theta[:, m], found["theta"]) and torch.equal(
            mine.buffers[:, m], found["buffers"]
        )
    one = dataclasses.replace(
        mine, **{k: v[:, :1] for k, v in mine.arrays().items()}, problem=problem
    )
    each = [
        dataclasses.replace(
            one, head=mine.head[:, m : m + 1], weights=torch.ones_like(one.weights)
        ).predict(x)
        for m in range(3)
    ]
    torch.testing.assert_close(
        mine.predict(x), torch.stack(each).mean(0), rtol=0, atol=1e-14
    )  # a mean of three
    assert (each[0] - each[2]).abs().max() > 1e-4


def test_it_learns_digits() -> None:
    """Ten clients with five shards each, eight of which train: chance is 10 percent, a client's
    most frequent class about 30.
    """
    everyone = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=5, seed=0
    )
    clients, holdout = everyone.hold_out(2, seed=0)
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options = {
        "rounds": 8,
        "fraction": 0.5,
        "local_epochs": 2,
        "batch_size": 20,
        "personal_lr": 0.05,
        "schedule": "constant",
    }
    run = fedhb.fit(module, clients, FedPop(), holdout=holdout, progress=False, **options)
    assert run.result["global"]["accuracy"] > 0.8 and run.result["personalised"]["accuracy"] > 0.9
    assert run.result["holdout"]["personalised"]["accuracy"] > 0.8
