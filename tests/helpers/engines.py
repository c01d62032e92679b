"""Rounds by an engine, runs that stop, and what two runs have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CASES, PLAN, clients, mlp, plan, same_bits

import fedhb
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Traffic
from fedhb.seeding import Randomness

RNG = Randomness(1, 1)


PERSONAL = replace(PLAN, train_head=True)


every_algorithm = pytest.mark.parametrize("name", CASES)


every_network = pytest.mark.parametrize(
    "network", ["mlp", "general"]
)  # one that knows the client axis, one that does not


def trained(
    algorithm: Any, prob: Any, who: Any, executor: Any, store: ClientStore, rounds: int = 2
) -> tuple[Any, Traffic]:
    """The server's state after some rounds with all clients and then with half of them."""
    server, traffic = algorithm.start(prob, Randomness(1)), Traffic()
    for number in range(1, rounds + 1):
        rng = Randomness(1, number)
        positions = range(len(who)) if number % 2 else range(0, len(who), 2)
        summary, traffic = executor.run(server, positions, plan(algorithm), rng)
        server = algorithm.aggregate(prob, server, summary, rng)
        store.commit()
    return server, traffic


ROUNDS = 5


class Stop:
    """Interrupts a run after a round, as Ctrl-C would."""

    def __init__(self, at: int):
        self.at = at

    def on_start(self, done: int, rounds: int) -> None:
        pass

    def on_round(self, record: dict[str, Any], state: Any) -> None:
        record["noted"] = state.done  # what callbacks add is kept
        if state.done == self.at:
            raise KeyboardInterrupt

    def on_end(self) -> None:
        pass


def fit(algorithm: Any, out: Any, stop: int = 0, **options: Any) -> Any:
    chosen = {"rounds": ROUNDS, "fraction": 0.5, "batch_size": 4, "seed": 3, "checkpoint_every": 2}
    chosen |= {"personal_epochs": 1, "progress": False}
    return fedhb.fit(
        mlp(torch.float32),
        clients(),
        algorithm,
        out=out,
        callbacks=[Stop(stop)],
        **(chosen | options),
    )


def records(run: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key != "seconds"} for record in run.records
    ]


def results(run: Any) -> dict[str, Any]:
    return {key: value for key, value in run.result.items() if key not in ("seconds", "executor")}


def memories(run: Any) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{key}": value
        for i, memory in run.state.store.memories.items()
        for key, value in memory.items()
    }


def assert_same_run(one: Any, other: Any) -> None:
    assert same_bits(one.state.server, other.state.server)
    assert (
        dict(sorted(memories(one).items())).keys() == dict(sorted(memories(other).items())).keys()
    )
    assert same_bits(memories(one), memories(other))
    assert records(one) == records(other) and results(one) == results(other)
    assert (
        one.state.traffic == other.state.traffic
        and one.state.client_rounds == other.state.client_rounds
    )
