"""The round loop (Alg. 1): draw a cohort, send L_0, sum the answers, solve for the new L_0."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.answers.defence import Defended
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Sums, Traffic
from fedhb.engine.schedule import Draw, learning_rate
from fedhb.errors import DivergedError
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

REMEMBERED = 10
"""Rounds whose median lengths make the running bound of filters (answers/defence.py)."""


class Executor(Protocol):
    """Something that trains a cohort."""

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the cohort's sums, and what was sent."""
        ...


class Callback:
    """A listener to a run: a progress bar, a logger. Subclasses override the methods they need.

    An object of another class may lack any of the methods.
    """

    def on_start(self, done: int, rounds: int) -> None:
        """Training starts, or goes on, after `done` of `rounds` rounds."""
        return

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """A round is done. Numbers that are added to the record are kept with it."""
        return

    def on_end(self) -> None:
        """Training is over, or was stopped."""
        return

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round: `done` of the clients are evaluated."""
        return

    def on_result(self, result: Mapping[str, Any]) -> None:
        """The run is evaluated and on disk; `result` is the content of result.json."""
        return


class Engine(Callback):
    """An executor of a whole run, which may add to the records of the rounds."""

    @property
    def chosen(self) -> Mapping[str, Any]:
        """What result.json holds of the engine."""
        return {}

    @property
    def note(self) -> str:
        """What the progress shows of the engine."""
        return ""

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the cohort's sums, and what was sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the engine holds."""
        return


@dataclass
class State:
    """Where a run stands.

    Attributes:
        server: the server's arrays.
        done: the rounds that are done.
        store: the clients' memories.
        traffic: bytes that were sent.
        client_rounds: the number of answers so far.
        seconds: the time that the rounds took.
        lengths: the answers' median lengths in the last rounds, where they are filtered.
        counted: the round of each client's last answer that counted, where clients keep their
            memories themselves and must be told which one holds (Flower).
    """

    server: Arrays
    done: int = 0
    store: ClientStore = field(default_factory=ClientStore)
    traffic: Traffic = field(default_factory=Traffic)
    client_rounds: int = 0
    seconds: float = 0.0
    lengths: tuple[float, ...] = ()
    counted: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The settings of the loop.

    Attributes:
        rounds: how many rounds there are (R).
        fraction: the share of the clients in each (f).
        plan: how a client trains.
        schedule: of the plan's learning rate.
        seed: of the cohorts and of everything random in a client.
    """

    rounds: int
    fraction: float
    plan: Plan
    schedule: str
    seed: int


def run(
    problem: Problem,
    algorithm: Algorithm,
    draw: Draw,
    training: Training,
    state: State,
    executor: Executor,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Do rounds `state.done + 1` to `training.rounds`, and change `state` in place.

    A round counts as a whole or not at all.
    """
    tell(callbacks, "on_start", state.done, training.rounds)
    try:
        while state.done < training.rounds:
            record = one_round(problem, algorithm, draw, training, state, executor)
            with ExitStack() as calls:  # each is called, in order, also where one raises
                for callback in reversed(callbacks):
                    calls.callback(tell, [callback], "on_round", record, state)
    finally:
        with ExitStack() as calls:
            for callback in reversed(callbacks):
                calls.callback(tell, [callback], "on_end")


def tell(callbacks: Sequence[Callback], method: str, *values: Any) -> None:
    """Call this method of every callback that has it."""
    for callback in callbacks:
        getattr(callback, method, lambda *_: None)(*values)


def check_server(server: Arrays, round_number: int) -> None:
    """Refuse a state with a number that is not finite.

    Answers may be finite, and their sums, squares or ratios not.
    """
    for key, value in server.items():
        # the sum is one fast pass; large numbers may overflow it, so look again
        if not torch.isfinite(value.sum()) and not torch.isfinite(value).all():
            raise DivergedError(
                f"round {round_number}: the server's {key!r} overflows: training diverges; lower "
                "the learning rate"
            )


def one_round(
    problem: Problem,
    algorithm: Algorithm,
    draw: Draw,
    training: Training,
    state: State,
    executor: Executor,
) -> dict[str, Any]:
    """Do one round, change `state` in place, and return the round's record."""
    start = time.perf_counter()
    rng = Randomness(training.seed, state.done + 1)
    lr = learning_rate(training.schedule, training.plan.lr, state.done, training.rounds)
    plan = dataclasses.replace(training.plan, lr=lr)
    positions = draw(rng.round)
    summary, traffic = executor.run(state.server, positions, plan, rng)
    lengths: tuple[float, ...] = state.lengths
    sifted: dict[str, Any] = {}
    if isinstance(algorithm, Defended):
        summary, length, sifted = algorithm.sift(problem, state.server, summary, rng, lengths)
        lengths = (*lengths, length)[-REMEMBERED:]
    server = algorithm.aggregate(problem, state.server, summary, rng)
    check_server(server, rng.round)
    record: dict[str, Any] = {
        "round": state.done + 1,
        "lr": lr,
        "clients": len(positions),
        **{
            key: summary[key].item() / summary["examples"].item() if key in summary else None
            for key in ("loss", "score")
        },
        **algorithm.report(problem, state.server, summary),
        **sifted,
        "down_bytes": traffic.down,
        "up_bytes": traffic.up,
        "seconds": time.perf_counter() - start,
    }
    state.done += 1  # first: an interruption from here on must not count the round without it
    state.server, state.lengths = server, lengths
    state.store.commit()
    state.client_rounds += len(positions)
    state.traffic = Traffic(state.traffic.down + traffic.down, state.traffic.up + traffic.up)
    state.seconds += record["seconds"]
    return record
