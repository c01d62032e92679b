"""The memory of clients between rounds."""

from __future__ import annotations

import pytest
import torch
from builders import CASES, clients, plan, problem

from engines import RNG, fit
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.schedule import cohort
from fedhb.seeding import Randomness

# the ensemble's groups follow from the ids: known before a client takes part, and never stored
REMEMBERING = [
    name for name, a in CASES.items() if a.remember(problem(), clients()) and a.name != "ensemble"
]


@pytest.mark.parametrize("name", REMEMBERING)
def test_only_clients_that_took_part_remember(name):
    run = fit(CASES[name], None, rounds=2, fraction=0.34)  # two of six clients in each round
    seen = {k for number in (1, 2) for k in cohort(6, 0.34, Randomness(3, number))}
    assert run.state.store.memories.keys() == seen and 2 <= len(seen) <= 4
    assert all(
        memory["seen"].item() == 1.0
        for memory in run.state.store.memories.values()
        if "seen" in memory
    )


@pytest.mark.parametrize("name", [name for name in CASES if name not in REMEMBERING])
def test_algorithms_without_memory_store_none(name):
    assert fit(CASES[name], None, rounds=2).state.store.memories == {}


@pytest.mark.parametrize("name", ["niw-last", "mixture-last"])
def test_a_client_begins_where_it_ended(name):
    """Its second update, with a step of size zero, finds what it remembers; a client without memory
    finds the centre.
    """
    algorithm, who, prob = CASES[name], clients(), problem()
    server = algorithm.start(prob, Randomness(1))
    received = algorithm.broadcast(server, who.ids.tolist())
    store = ClientStore()
    some = who.select([1, 3])
    found, memory = algorithm.local_update(
        prob, received, some, store.load(algorithm, prob, some), plan(algorithm), RNG
    )
    store.put(some.ids.tolist(), memory)
    assert store.memories == {}  # a round counts when it is done
    store.commit()
    still, _ = algorithm.local_update(
        prob, received, who, store.load(algorithm, prob, who), plan(algorithm, lr=1e-300), RNG
    )
    torch.testing.assert_close(still["m"][[1, 3]], found["m"])
    torch.testing.assert_close(still["m"][[0, 2]], algorithm.centre(received).expand(2, -1))
    assert not torch.allclose(still["m"][1], still["m"][0])
