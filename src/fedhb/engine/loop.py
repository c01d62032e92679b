"""The round loop (Alg. 1): sample a cohort, send L_0, sum what the clients found, solve for the new L_0, record, keep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.answers.defence import Defended
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Traffic
from fedhb.engine.schedule import Draw, learning_rate
from fedhb.errors import DivergedError
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

REMEMBERED = 10
"""Rounds whose median lengths make the running bound of filters (defence.py)."""


class Executor(Protocol):
    """Whatever can run a cohort."""

    def run(
        self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness
    ) -> tuple[Arrays, Traffic]:
        """The cohort's sums and what was sent."""
        ...


class Callback:
    """Told of every round; a progress bar, a logger, an evaluation. Subclasses override what they need.

    What is no subclass may lack any of the methods.
    """

    def on_start(self, done: int, rounds: int) -> None:
        """Training begins (or goes on) after `done` of `rounds` rounds."""
        return

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """A round is done. Whatever is added to the record is kept with it."""
        return

    def on_end(self) -> None:
        """Training is over, or stopped."""
        return

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round: so many clients are evaluated."""
        return

    def on_result(self, result: Mapping[str, Any]) -> None:
        """The run is evaluated and on disk: what result.json holds."""
        return


@dataclass
class State:
    """Where a run stands: the rounds done, the server's arrays, the clients' memories, bytes and seconds so far.

    `lengths` are the answers' median lengths in the last rounds, where they are filtered (defence.py). `counted` is the round of
    each client's last answer that counted, where clients keep their own memories and must be told which of them holds (Flower).
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
    """The settings of the loop: rounds (R), fraction (f), the clients' plan and the schedule of its learning rate, the seed."""

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
    """Rounds `state.done + 1` to `training.rounds`, in place. A round counts whole or not at all."""
    tell(callbacks, "on_start", state.done, training.rounds)
    try:
        while state.done < training.rounds:
            record = one_round(problem, algorithm, draw, training, state, executor)
            with ExitStack() as told:  # all of them, in order, also where one raises
                for callback in reversed(callbacks):
                    told.callback(tell, [callback], "on_round", record, state)
    finally:
        with ExitStack() as told:
            for callback in reversed(callbacks):
                told.callback(tell, [callback], "on_end")


def tell(callbacks: Sequence[Callback], what: str, *values: Any) -> None:
    """Call this method of every callback that has it."""
    for callback in callbacks:
        getattr(callback, what, lambda *_: None)(*values)


def check_server(server: Arrays, round_number: int) -> None:
    """Refuse a state with a number that is not finite: answers may be finite, and their sums, squares or ratios not."""
    for key, value in server.items():
        if (
            not torch.isfinite(value.sum()) and not torch.isfinite(value).all()
        ):  # one fast pass, as in updates.py
            raise DivergedError(
                f"round {round_number}: the server's {key!r} overflows: training diverges; lower the learning rate"
            )


def one_round(
    problem: Problem,
    algorithm: Algorithm,
    draw: Draw,
    training: Training,
    state: State,
    executor: Executor,
) -> dict[str, Any]:
    """One round, and what there is to say about it."""
    begun = time.perf_counter()
    rng = Randomness(training.seed, state.done + 1)
    lr = learning_rate(training.schedule, training.plan.lr, state.done, training.rounds)
    plan = Plan(
        training.plan.epochs,
        training.plan.batch_size,
        lr,
        training.plan.momentum,
        training.plan.train_head,
    )
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
        "seconds": time.perf_counter() - begun,
    }
    state.done += 1  # first: whoever is interrupted from here on has no record of this round, and keeps the one before
    state.server, state.lengths = server, lengths
    state.store.commit()
    state.client_rounds += len(positions)
    state.traffic = Traffic(state.traffic.down + traffic.down, state.traffic.up + traffic.up)
    state.seconds += record["seconds"]
    return record
