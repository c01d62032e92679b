"""Chooses who trains: this process, or workers where the first chunk shows that they pay.

The choice by time never shows in the numbers: the chunks are cut before, by the amount of work and
the number of cores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.clients.clients import Clients
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Sums, chunk_size, cores, deal, fold
from fedhb.engine.in_process import InProcess
from fedhb.engine.loop import Engine, Training
from fedhb.engine.schedule import cohort_size
from fedhb.engine.timetable import Timetable
from fedhb.engine.workers import Workers
from fedhb.errors import InputError
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

LEAST_CHUNK = 0.004
"""Seconds a chunk must take for another process to be worth its messages."""

LEAST_GAIN = 0.5
"""Seconds that workers must save over the whole run, which pays for starting them."""

LEAST_WORK = 6e8
"""Floating-point operations of a round that are worth sharing.

Fewer are done sooner with all clients in one chunk.
"""


def can_fork() -> bool:
    """Return whether processes can be forked after training has started.

    Where torch sees a device, its autograd starts threads that do not survive a fork.
    """
    device = (
        torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )
    return sys.platform == "linux" and not device


class Automatic(Engine):
    """Trains the first chunk in this process, and by its time decides who trains the others.

    Args:
        problem, algorithm, clients, store: as for every executor.
        training: the rounds, the share of the clients in each, and what they do.
        done: how many exchanges are done already.
        workers: how many processes; 0 to decide.
        timetable: the phases before and after the rounds; None for none.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        store: ClientStore,
        *,
        training: Training,
        done: int = 0,
        workers: int = 0,
        timetable: Timetable | None = None,
    ):
        count = cohort_size(len(clients), training.fraction)
        examples = count / len(clients) * clients.num_examples * training.plan.epochs
        # 2 operations forward and 4 backward for each weight and example
        work = 6.0 * problem.network.num_params * examples
        if workers > 1 and problem.network.device.type != "cpu":
            raise InputError(
                f"workers={workers} with device={problem.network.device}: a device works in one "
                "process, workers=1"
            )
        parts = workers or (cores() if can_fork() and work >= LEAST_WORK else 1)
        self.chunk = len(clients) if algorithm.pools else chunk_size(problem.network, count, parts)
        self.sizes, self.rounds = clients.sizes.tolist(), training.rounds - done
        self._here = InProcess(problem, algorithm, clients, store, self.chunk, timetable)
        most = 1 if algorithm.pools else min(-(-count // self.chunk), parts)
        self._workers = (
            Workers(problem, algorithm, clients, store, most, self.chunk, timetable)
            if most > 1
            else None
        )
        self._decided = self._workers is None or workers > 0

    @property
    def chosen(self) -> dict[str, int]:
        """The number of processes that train, and of clients that each trains at once."""
        several = self._workers.count if self._workers is not None and self._decided else 1
        return {"workers": several, "clients_at_once": self.chunk}

    @property
    def note(self) -> str:
        """The number of processes, where there are several."""
        count = self.chosen["workers"]
        return f"  {count} processes" if count > 1 else ""

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the summed statistics of the clients at these positions, and what was sent."""
        chunks = deal(self.sizes, positions, self.chunk)
        if self._decided:
            return fold(self._train(server, chunks, plan, rng))
        start = time.perf_counter()
        first = self._here.train(server, chunks[0], plan, rng)
        self._decide(time.perf_counter() - start, len(chunks))
        return fold(chain([first], self._train(server, chunks[1:], plan, rng)))

    def _train(
        self, server: Arrays, chunks: Sequence[Sequence[int]], plan: Plan, rng: Randomness
    ) -> Iterator[Sums]:
        if self._workers is not None:
            return self._workers.train(server, chunks, plan, rng)
        return (self._here.train(server, part, plan, rng) for part in chunks)

    def _decide(self, seconds: float, chunks: int) -> None:
        assert self._workers is not None
        ahead = seconds * (chunks * self.rounds - 1)
        if seconds < LEAST_CHUNK or ahead * (1.0 - 1.0 / self._workers.count) < LEAST_GAIN:
            self._workers = None
        self._decided = True

    def close(self) -> None:
        """Stop the workers, if there are any."""
        if self._workers is not None:
            self._workers.close()
