"""Worker processes: what they cost, and what is said when one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from builders import CASES, assert_close, clients, plan, problem, same_bits

import fedhb
from engines import RNG, fit, trained
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.workers import Workers
from fedhb.seeding import Randomness


@pytest.fixture
def processes() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_more_workers_than_clients(processes):
    one, three = (
        fit(fedhb.FedAvg(), None, rounds=1, fraction=0.2, workers=workers) for workers in (1, 3)
    )
    assert_close(three.state.server, one.state.server, 1e-6)


def test_a_workers_error_is_the_runs_error(processes):
    with pytest.raises(fedhb.DivergedError, match=r"round 1.*client"):
        fit(fedhb.FedAvg(), None, workers=2, lr=1e38, local_epochs=3)


def test_memories_cost_no_file_handles(processes):
    """Shared memory would keep a handle open for every array of every client that remembers."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    algorithm, who = CASES["niw-last"], clients([2] * 60)
    prob, store = problem(who=who), ClientStore()
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))
    try:
        executor = Workers(prob, algorithm, who, store, 2)
        try:
            trained(algorithm, prob, who, executor, store, rounds=3)
        finally:
            executor.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(store.memories) == 60


def test_a_worker_that_dies_is_replaced_by_the_others(processes, caplog):
    """Its chunk is trained again: the numbers are those of an undisturbed round."""
    algorithm, who, prob = CASES["niw-last"], clients(), problem()
    results_ = []
    for victim in (False, True):
        store = ClientStore()
        executor = Workers(prob, algorithm, who, store, 2, chunk=1)
        server = algorithm.start(prob, RNG)
        try:
            for round_number in range(3):
                if victim and round_number == 1:
                    os.kill(executor._workers[0].process.pid, signal.SIGKILL)
                summary, _ = executor.run(
                    server, range(len(who)), plan(algorithm), Randomness(5, round_number + 1)
                )
                server = algorithm.aggregate(prob, server, summary, RNG)
                store.commit()
        finally:
            executor.close()
        results_.append((server, store.memories))
    (one, memory), (two, memory_two) = results_
    assert same_bits(one, two) and all(
        same_bits(memory[client], memory_two[client]) for client in memory
    )
    assert "exit code -9" in caplog.text


class Broken(fedhb.FedAvg):
    """An algorithm with a mistake."""

    def local_update(
        self, problem: Any, received: Any, clients: Any, memory: Any, plan: Any, rng: Any
    ) -> Any:
        raise ValueError("client 5's data are malformed")


def test_a_mistake_in_a_worker_is_said_as_it_is(processes):
    with pytest.raises(RuntimeError, match="client 5's data are malformed"):
        fit(Broken(), None, workers=2)


def test_a_worker_has_no_hold_on_the_others(processes):
    """Each ends as soon as its own pipe is closed: none keeps the parent's end of another's open."""
    algorithm, who, prob = CASES["fedavg-full"], clients(), problem()
    executor = Workers(prob, algorithm, who, ClientStore(), 3, chunk=1)
    try:
        executor.run(algorithm.start(prob, RNG), range(len(who)), plan(algorithm), RNG)
        first = executor._workers[0]
        first.pipe.close()
        first.process.join(timeout=1.5)  # before it would look whether its parent is still there
        assert not first.process.is_alive()
    finally:
        executor.close()
