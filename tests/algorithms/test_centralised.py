"""Centralised training: one pool of examples, in every order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    labelled,
    mlp,
    plan_of,
    problem_of,
    same_bits,
    seeded,
)
from torch import nn

import fedhb
from fedhb.algorithms.centralised import Centralised
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.seeding import Randomness
from fedhb.training.batches import batches

SHUFFLES = ("client", "pooled")


def numbered() -> Clients:
    """Whose example it is and its number can be read off: x = 100 id + n.

    The ids are not positions.
    """
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
    # The server takes the result as it is: theta + (found - theta) rounds to found, numbers below
    # ten.
    for key in ("theta", "buffers"):
        torch.testing.assert_close(new[key], found[key][0], rtol=0, atol=1e-15)
        assert not torch.equal(new[key], server[key])
    with pytest.raises(InputError, match=r"client 1 .*example"):
        Centralised(update="body", shuffle="client").local_update(
            problem, server, clients, {}, plan, RNG
        )


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
    # Chance is 0.1. Half of the clients hold most classes; client after client, the later ones' are
    # remembered better.
    assert accuracy["pooled"] > 0.9 and 0.6 < accuracy["client"] < accuracy["pooled"]
