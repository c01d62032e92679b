"""Two workers compute the numbers of one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest
from builders import CASES, FEATURES, assert_close, clients, plan, problem, same_bits

import fedhb
from engines import fit, trained
from fedhb.engine.automatic import Automatic
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.engine.loop import Training
from fedhb.engine.workers import Workers

WORKERS = ["fedem-full", "ensemble-preset", "local-body"]


@pytest.fixture
def processes() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "name",
    [
        "empirical-bayes-full",
        "niw-full",
        "empirical-bayes-last",
        "mixture-three",
        "fedavg-full",
        "fedprox-body",
        "fedbabu-body",
        *WORKERS,
    ],
)
def test_two_workers_are_one(name, processes):
    algorithm, who, prob = CASES[name], clients(), problem()
    results_ = []
    for count in (1, 2):
        store = ClientStore()
        executor = (
            InProcess(prob, algorithm, who, store)
            if count == 1
            else Workers(prob, algorithm, who, store, count)
        )
        try:
            server, traffic = trained(algorithm, prob, who, executor, store, rounds=3)
        finally:
            executor.close()
        results_.append((server, store.memories, traffic))
    (one, memory, sent), (two, memory_two, sent_two) = results_
    assert_close(two, one, 1e-12)
    assert sent == sent_two and memory.keys() == memory_two.keys()
    for client in memory:
        assert_close(memory_two[client], memory[client], 1e-12)


def test_a_run_with_workers(tmp_path, processes):
    one, two = (
        fit(fedhb.EmpiricalBayes(begin="last"), tmp_path / str(w), workers=w) for w in (1, 2)
    )
    # float32 weights: the order of the float64 sums may show in their last bit
    assert_close(two.state.server, one.state.server, 1e-6)
    assert two.result["communication"] == one.result["communication"]
    np.testing.assert_allclose(
        two.predict(np.ones((3, FEATURES))), one.predict(np.ones((3, FEATURES))), rtol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["empirical-bayes-last", "mixture-three", "fedbe-body", "pfedbayes-full"]
)
def test_who_trains_a_chunk_does_not_matter(name, processes):
    """One process, several, and one that hands over to several: the same bits, because sums are
    added in the chunks' order.
    """
    algorithm, who, prob = CASES[name], clients(), problem()
    training = Training(3, 1.0, plan(algorithm), "constant", 5)

    def automatic(store: ClientStore, seconds: float) -> Automatic:
        executor = Automatic(prob, algorithm, who, store, training=training)
        executor.chunk = executor._here.chunk = 2
        executor._workers, executor._decided = Workers(prob, algorithm, who, store, 2, 2), False
        decide = executor._decide
        executor._decide = lambda _, chunks: decide(seconds, chunks)
        return executor

    results_ = []
    for make in (
        lambda store: InProcess(prob, algorithm, who, store, 2),
        lambda store: Workers(prob, algorithm, who, store, 3, 2),
        lambda store: automatic(store, seconds=1.0),
        lambda store: automatic(store, seconds=1e-6),
    ):
        store = ClientStore()
        executor = make(store)
        try:
            server, _ = trained(algorithm, prob, who, executor, store, rounds=3)
            if isinstance(executor, Automatic):
                results_.append(executor.chosen["workers"])
        finally:
            executor.close()
        results_.append((server, store.memories))
    (one, memory), two, several, handed_over, alone, kept = results_
    assert (several, alone) == (2, 1)
    for other, memories_ in (two, handed_over, kept):
        assert same_bits(one, other) and all(
            same_bits(memory[client], memories_[client]) for client in memory
        )
