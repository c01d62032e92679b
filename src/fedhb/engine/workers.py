"""Trains a cohort on several processes: each trains one chunk after another and returns its sums.

The workers are forked with the problem and the clients' data. The server's arrays go down and sums
come back through shared memory; the memories of clients go through the pipe. Nothing is lost with a
worker that dies, hangs or runs out of memory: another one trains its chunk again, and from the next
round on a new one replaces it. Workers end with the process that forked them, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.clients.clients import Clients
from fedhb.engine import shared_memory
from fedhb.engine.allocator import keep
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Sums, chunk_size, deal, fold
from fedhb.engine.in_process import InProcess
from fedhb.engine.shared_memory import Label, Shelf
from fedhb.engine.timetable import Timetable
from fedhb.errors import InputError, Stopped, WorkersError
from fedhb.processes import NO_MEMORY, Child, can_fork, start
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

log = logging.getLogger(__name__)


PATIENCE = 60.0
"""Seconds without work after which a worker counts as hung, or more where chunks take long."""

SLOWER = 20
"""A chunk that takes this many times as long as the longest before it is not slow but stuck."""

LOOK = 2.0
"""Seconds between two looks at the workers."""


@dataclass(kw_only=True)
class Worker(Child):
    """A child process, and the shelf that it puts its sums on.

    It started its chunk at `started`; `work` is the processor time that it had used at `since`.
    """

    sums: Shelf
    started: float = 0.0
    since: float = 0.0
    work: float = 0.0


class Workers:
    """Deals a cohort's chunks to `count` processes with one thread each, when they are free."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        store: ClientStore,
        count: int,
        chunk: int | None = None,
        timetable: Timetable | None = None,
    ):
        if not can_fork():
            raise InputError(
                f"workers={count} needs a system that can fork processes: use workers=1"
            )
        self.problem, self.algorithm, self.clients, self.store, self.count = (
            problem,
            algorithm,
            clients,
            store,
            count,
        )
        self.chunk, self.timetable = chunk or chunk_size(problem.network), timetable
        self._server: Shelf | None = None
        self._workers: list[Worker] = []
        self._longest = 0.0
        self._again = True

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the summed statistics of the clients at these positions, and what was sent."""
        return fold(
            self.train(server, deal(self.clients.sizes.tolist(), positions, self.chunk), plan, rng)
        )

    def train(
        self, server: Arrays, chunks: Sequence[Sequence[int]], plan: Plan, rng: Randomness
    ) -> Iterator[Sums]:
        """Yield the sums of the chunks, in their order, each as soon as it can be."""
        labels = self._show(server)
        self._again = True
        waiting = list(range(len(chunks)))[::-1]
        busy: dict[Connection, tuple[Worker, int]] = {}
        done: dict[int, Sums] = {}
        for next_ in range(len(chunks)):
            while next_ not in done:
                free = [w for w in self._workers if w.pipe not in busy]
                while waiting and free:
                    worker, k = free.pop(), waiting.pop()
                    busy[worker.pipe] = worker, k
                    self._send(worker, (labels, chunks[k], self._memories(chunks[k]), plan, rng))
                for pipe in wait(list(busy), timeout=LOOK):
                    assert isinstance(pipe, Connection)
                    worker, k = busy.pop(pipe)
                    sums = self._receive(worker)
                    if sums is None:
                        waiting.append(k)
                        self._bury(worker)
                    else:
                        done[k] = sums
                        self._longest = max(self._longest, time.monotonic() - worker.started)
                for worker, _ in busy.values():
                    if self._hangs(worker):
                        log.warning("a worker process does not go on: it is stopped")
                        worker.process.kill()  # and found dead at the next look
            yield done.pop(next_)

    def _show(self, server: Arrays) -> list[Label]:
        """Put the server's arrays where the workers see them.

        Workers are started here, and again where the room is too small.
        """
        if self._server is None or shared_memory.size(server) > self._server.capacity:
            self.close()
            self._server = Shelf(2 * shared_memory.size(server))
        self._fill(self._server)
        return self._server.put(server)

    def _fill(self, server: Shelf) -> None:
        """Start workers until there are as many as there should be."""
        while len(self._workers) < self.count:
            self._workers.append(self._fork(server))

    def _hangs(self, worker: Worker) -> bool:
        """Return whether a busy worker has done nothing for too long, or does not end its chunk."""
        now, work = time.monotonic(), used(worker.process.pid)
        if work != worker.work:
            worker.work, worker.since = work, now
        idle = now - worker.since if work >= 0 else 0.0
        stuck = self._longest > 0 and now - worker.started > SLOWER * self._longest + PATIENCE
        return idle > PATIENCE or stuck

    @contextlib.contextmanager
    def _patient(self, worker: Worker) -> Iterator[None]:
        """Kill a worker that stops in the middle of a message, which ends the wait for the rest."""
        timer = threading.Timer(PATIENCE, worker.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _fork(self, server: Shelf) -> Worker:
        sums = Shelf(4 * server.capacity)  # float64, and some algorithms sum more than they send
        executor = InProcess(
            self.problem, self.algorithm, self.clients, ClientStore(), self.chunk, self.timetable
        )
        child = start("fork", _work, executor, server, sums, daemon=True)
        return Worker(child.process, child.pipe, sums=sums)

    def _memories(self, positions: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
        ids = [int(self.clients.ids[k]) for k in positions]
        return {i: _pack(self.store.memories[i]) for i in ids if i in self.store.memories}

    def _send(self, worker: Worker, task: object) -> None:
        worker.started = worker.since = time.monotonic()
        worker.work = used(worker.process.pid)
        with (
            contextlib.suppress(OSError),
            self._patient(worker),
        ):  # it is dead, and found so when its answer is read
            worker.pipe.send(task)

    def _receive(self, worker: Worker) -> Sums | None:
        """Return a chunk's sums, or None where the worker has died."""
        try:
            with self._patient(worker):
                answer = worker.pipe.recv()
        except (EOFError, OSError):  # before its answer, or in the middle of it
            return None
        if isinstance(answer, Exception):
            raise answer
        labels, summary, traffic, memories = answer
        for client, memory in memories.items():
            self.store.put(
                [client], {key: value.unsqueeze(0) for key, value in _unpack(memory).items()}
            )
        if labels is None:
            return _unpack(summary), traffic
        return {k: v.clone() for k, v in worker.sums.get(labels).items()}, traffic

    def _bury(self, worker: Worker) -> None:
        """Remove a dead worker; where none is left, start new ones once."""
        why = worker.ending()
        worker.pipe.close()
        self._workers.remove(worker)
        if not self._workers and not self._again:
            raise WorkersError(
                f"all worker processes died, the last with {why}: resume the run, with fewer "
                "workers"
            )
        log.warning("a worker process died (%s); the others go on with its clients", why)
        if not self._workers:
            self._again = False
            assert self._server is not None
            self._fill(self._server)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers, self._server = [], None


def _pack(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return arrays for a pipe: each tensor would need an open file."""
    return {key: value.cpu().numpy() for key, value in arrays.items()}


def _unpack(arrays: dict[str, np.ndarray]) -> Arrays:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}


def used(pid: int | None) -> float:
    """Return the processor time that a process has used, in ticks; -1 where it is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return -1.0


def _work(pipe: Connection, executor: InProcess, server: Shelf, sums: Shelf) -> None:
    keep()
    while True:
        try:
            labels, share, memories, plan, rng = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        store = executor.store = ClientStore()
        store.memories = {client: _unpack(memory) for client, memory in memories.items()}
        try:
            summary, traffic = executor.train(server.get(labels), share, plan, rng)
            store.commit()
            changed = {i: _pack(store.memories[i]) for i in store.changed}
            fits = shared_memory.size(summary) <= sums.capacity
            answer = (sums.put(summary), None) if fits else (None, _pack(summary))
            reply: object = (*answer, traffic, changed)
        except KeyboardInterrupt:
            return
        except (Stopped, InputError) as error:
            reply = error
        except (
            Exception
        ) as error:  # a user's model, likelihood or algorithm: said as it is, not tried again
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                os._exit(NO_MEMORY)  # another worker may find the room
            reply = RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
        try:
            pipe.send(reply)
        except (OSError, KeyboardInterrupt):
            return
