"""The duties of an algorithm towards the engines, for every algorithm of the registry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from builders import (
    CASES,
    CLASSES,
    FEATURES,
    NETWORKS,
    assert_close,
    clients,
    plan,
    problem,
    same_bits,
)

from engines import PERSONAL, RNG, every_algorithm, every_network, trained
from fedhb.algorithms import ALGORITHMS, Hierarchical
from fedhb.algorithms.toolbox import add
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.seeding import Randomness


def test_the_cases_hold_every_algorithm_and_every_update():
    for name, cls in ALGORITHMS.items():
        mine = [a for a in CASES.values() if a.name == name]
        assert {a.update for a in mine} == {"body", "full"}
        assert not issubclass(cls, Hierarchical) or {a.begin for a in mine} == {"global", "last"}


def snapshot(*values: Any) -> list[dict[str, torch.Tensor]]:
    return [{key: value.clone() for key, value in arrays.items()} for arrays in values]


def pools(who: Any) -> dict[str, torch.Tensor]:
    shares = {"train": who.train, "test": who.test}
    found = {
        f"{s}.{k}": getattr(share, k)
        for s, share in shares.items()
        for k in ("x", "y", "rows", "offsets")
    }
    return found | {"ids": who.ids, "mean": who.scaling.mean, "std": who.scaling.std}


def vectors(prob: Any) -> dict[str, torch.Tensor]:
    network = prob.network
    return {
        "theta": network.theta,
        "head": network.head,
        "buffers": network.buffers,
        **dict(network.module.state_dict()),
    }


def rows(
    arrays: dict[str, torch.Tensor], positions: Any, keys: Any = None
) -> dict[str, torch.Tensor]:
    """The arrays of the clients at these positions; with `keys`, only those have a client axis."""
    return {
        key: value[list(positions)] if keys is None or key in keys else value
        for key, value in arrays.items()
    }


@every_network
@every_algorithm
def test_any_number_of_clients_at_once_gives_the_same(name, network):
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    results = {}
    for chunk in (1, 4, len(who)):
        store = ClientStore()
        server, traffic = trained(
            algorithm, prob, who, InProcess(prob, algorithm, who, store, chunk), store
        )
        results[chunk] = (server, store.memories, traffic)
    server, memories, traffic = results[1]
    for chunk in (4, len(who)):
        assert_close(results[chunk][0], server, what=f"{chunk} at once")
        assert results[chunk][1].keys() == memories.keys() and results[chunk][2] == traffic
        for client in memories:
            assert_close(
                results[chunk][1][client], memories[client], what=f"memory of client {client}"
            )
    assert not torch.equal(
        next(iter(server.values())), next(iter(algorithm.start(prob, Randomness(1)).values()))
    )


@every_network
@every_algorithm
def test_clients_in_any_order_find_and_become_the_same(name, network):
    """Directly, without the engine's order by size: what is found, and the personal posteriors."""
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    server = algorithm.start(prob, Randomness(1))
    order = [4, 2, 0, 5, 1, 3]
    store, some = ClientStore(), who.select(order)
    received = algorithm.broadcast(server, some.ids.tolist())
    memory = store.load(algorithm, prob, some)
    found, remembered = algorithm.local_update(prob, received, some, memory, plan(algorithm), RNG)
    personal = algorithm.personalise(prob, server, some, memory, PERSONAL, RNG)
    x = torch.stack([who.test.examples(k)[0] for k in order])
    predictions = personal.predict(x)
    for c, k in enumerate(order):
        one = who.select([k])
        if not algorithm.pools:
            mine_alone = (
                algorithm.broadcast(server, one.ids.tolist()),
                one,
                store.load(algorithm, prob, one),
            )
            alone, alone_remembered = algorithm.local_update(
                prob, *mine_alone, plan(algorithm), RNG
            )
            assert_close(rows(found, [c]), alone, what=f"client {k}")
            assert_close(rows(remembered, [c]), alone_remembered, what=f"memory of client {k}")
        mine = algorithm.personalise(
            prob, server, one, store.load(algorithm, prob, one), PERSONAL, RNG
        )
        assert_close(personal.client(c).arrays(), mine.arrays(), what=f"personalised client {k}")
        torch.testing.assert_close(
            predictions[c], mine.predict(x[c : c + 1])[0], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", [name for name, a in CASES.items() if not a.pools])
def test_sums_are_additive_in_any_order(name):
    algorithm, who, prob = CASES[name], clients(), problem()
    server = algorithm.start(prob, Randomness(1))
    received = algorithm.broadcast(server, who.ids.tolist())
    memory = ClientStore().load(algorithm, prob, who)
    found, _ = algorithm.local_update(prob, received, who, memory, plan(algorithm), RNG)
    whole = algorithm.summarise(prob, received, found, RNG)
    assert all(value.dtype == torch.float64 for value in whole.values())
    new = algorithm.aggregate(prob, server, whole, RNG)
    for size, order in itertools.product(
        (1, 2, len(who)), ([0, 1, 2, 3, 4, 5], [3, 1, 5, 0, 4, 2])
    ):
        total = None
        for begin in range(0, len(who), size):
            some = order[begin : begin + size]
            part = algorithm.summarise(
                prob, rows(received, some, algorithm.each), rows(found, some), RNG
            )
            total = add(total, part)
        assert_close(total, whole, 1e-12, f"{size} at a time")
        assert_close(algorithm.aggregate(prob, server, total, RNG), new, 1e-12)


@every_network
@every_algorithm
def test_no_step_changes_what_it_was_given(name, network):
    algorithm, who, prob = CASES[name], clients(standardise=True), problem(NETWORKS[network]())
    server = algorithm.start(prob, Randomness(1))
    memory = ClientStore().load(algorithm, prob, who)
    torch.manual_seed(0)
    before, randomness = snapshot(server, memory, pools(who), vectors(prob)), torch.get_rng_state()
    received = algorithm.broadcast(server, who.ids.tolist())
    sent = snapshot(received)[0]
    found, remembered = algorithm.local_update(prob, received, who, memory, plan(algorithm), RNG)
    answers = snapshot(found, remembered)
    summary = algorithm.summarise(prob, received, found, RNG)
    sums = snapshot(summary)[0]
    new = algorithm.aggregate(prob, server, summary, RNG)
    after = snapshot(new)[0]
    algorithm.report(prob, new, summary)
    algorithm.predict(prob, new, who.test.x, RNG)
    algorithm.personalise(prob, new, who, remembered, PERSONAL, RNG).predict(
        who.test.x[:4].expand(len(who), 4, FEATURES)
    )
    algorithm.local_update(
        prob, algorithm.broadcast(new, who.ids.tolist()), who, remembered, plan(algorithm), RNG
    )
    for what, now, then in (
        ("server", server, before[0]),
        ("memory", memory, before[1]),
        ("clients", pools(who), before[2]),
        ("network", vectors(prob), before[3]),
        ("received", received, sent),
        ("found", found, answers[0]),
        ("remembered", remembered, answers[1]),
        ("summary", summary, sums),
        ("new server", new, after),
    ):
        assert same_bits(now, then), what
    assert torch.equal(torch.get_rng_state(), randomness)
    assert not same_bits(new, server)


@every_network
@every_algorithm
def test_predictions_are_probabilities(name, network):
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    store = ClientStore()
    server, _ = trained(
        algorithm, prob, who, InProcess(prob, algorithm, who, store), store, rounds=1
    )
    p = algorithm.predict(prob, server, who.test.x, RNG)
    assert torch.equal(algorithm.predict(prob, server, who.test.x, RNG), p)
    memory = store.load(algorithm, prob, who)
    mine = algorithm.personalise(prob, server, who, memory, PERSONAL, RNG).predict(
        who.test.x[:5].expand(len(who), 5, FEATURES)
    )
    assert p.shape == (len(who.test.x), CLASSES) and mine.shape == (len(who), 5, CLASSES)
    for each in (p, mine):
        assert (each >= 0).all()
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1], dtype=torch.float64))
    assert not torch.allclose(mine[0], mine[1])  # personal
