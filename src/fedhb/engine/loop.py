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
from fedhb.engine.timetable import Stage, Timetable
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

    def on_phase(self, record: dict[str, Any], state: State) -> None:
        """Hear of an exchange before the first round or after the last."""
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
        """The engine's entries in result.json."""
        return {}

    @property
    def note(self) -> str:
        """The engine's words in the progress."""
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
        done: the exchanges that are done: rounds, and those of phases.
        store: the clients' memories.
        traffic: bytes that were sent.
        client_rounds: the number of clients that were asked so far.
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
    timetable: Timetable | None = None,
) -> None:
    """Do the exchanges from `state.done` + 1 to the last one, and change `state` in place.

    An exchange counts as a whole or not at all.
    """
    timetable = timetable or Timetable(training.rounds)
    tell(callbacks, "on_start", timetable.rounds_done(state.done), training.rounds)
    try:
        while state.done < timetable.total:
            stage = timetable.stage(state.done + 1)
            now = stage or Stage.of_round(algorithm, draw)
            record = one_exchange(problem, now, training, state, executor, timetable)
            event = "on_round" if stage is None else "on_phase"
            with ExitStack() as calls:  # each is called, in order, also where one raises
                for callback in reversed(callbacks):
                    calls.callback(tell, [callback], event, record, state)
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


def one_exchange(
    problem: Problem,
    stage: Stage,
    training: Training,
    state: State,
    executor: Executor,
    timetable: Timetable,
) -> dict[str, Any]:
    """Do a round, or one exchange of a phase; change `state` in place, and return the record."""
    start = time.perf_counter()
    steps, phase, number = stage.steps, stage.phase.name, state.done + 1
    rng, rounds = Randomness(training.seed, number), training.rounds
    done = min(timetable.rounds_done(state.done), rounds - 1)  # phases after them: the last rate
    lr = learning_rate(training.schedule, training.plan.lr, done, rounds)
    plan = dataclasses.replace(training.plan, lr=lr)
    positions = stage.draw(number)
    summary, traffic = executor.run(state.server, positions, plan, rng)
    lengths = () if phase else state.lengths
    sifted: dict[str, Any] = {}
    if isinstance(steps, Defended):
        summary, length, sifted = steps.sift(problem, state.server, summary, rng, lengths)
        lengths = (*lengths, length)[-REMEMBERED:]
    server = steps.aggregate(problem, state.server, summary, rng)
    check_server(server, number)
    about: dict[str, Any] = {"round": timetable.rounds_done(number)}
    if timetable.stages:
        about |= {"exchange": number}
    if phase:
        about |= {"phase": phase}
    record: dict[str, Any] = {
        **about,
        "lr": lr,
        "clients": len(positions),
        **{
            key: summary[key].item() / summary["examples"].item() if key in summary else None
            for key in ("loss", "score")
        },
        **steps.report(problem, state.server, summary),
        **sifted,
        "down_bytes": traffic.down,
        "up_bytes": traffic.up,
        "seconds": time.perf_counter() - start,
    }
    state.done += 1  # first: an interruption from here on must not count the round without it
    state.server, state.lengths = server, state.lengths if phase else lengths
    state.store.commit()
    state.client_rounds += len(positions)
    state.traffic = Traffic(state.traffic.down + traffic.down, state.traffic.up + traffic.up)
    state.seconds += record["seconds"]
    return record
