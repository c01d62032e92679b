"""The cohort on several worker processes: each trains one chunk of clients after another and gives back its sums.

The workers are forked with the problem and the clients' data. The server's arrays go down and sums come back through memory that
is shared; the memories of clients that have any go through the pipe. A worker that dies takes nothing along: its chunk is trained
again by another one.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from fedhb.algorithms.base import Algorithm, Arrays, Plan, Problem
from fedhb.clients import Clients
from fedhb.engine import shelf
from fedhb.engine.executor import InProcess, Sums, chunk_size, deal, fold
from fedhb.engine.memory import keep
from fedhb.engine.shelf import Label, Shelf
from fedhb.engine.store import ClientStore
from fedhb.errors import DivergedError, InputError
from fedhb.seeding import Randomness

log = logging.getLogger(__name__)


@dataclass
class Worker:
    """A process, the pipe to it, and the shelf that it puts its sums on."""

    process: BaseProcess
    pipe: Connection
    sums: Shelf


class Workers:
    """An executor that deals a cohort's chunks to `count` processes with one thread each, as they come free."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        store: ClientStore,
        count: int,
        chunk: int | None = None,
    ):
        if "fork" not in multiprocessing.get_all_start_methods():
            raise InputError(f"workers={count} needs a system that can fork processes: use workers=1")
        self.problem, self.algorithm, self.clients, self.store, self.count = problem, algorithm, clients, store, count
        self.chunk = chunk or chunk_size(problem.network)
        self._server: Shelf | None = None
        self._workers: list[Worker] = []

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """The summed statistics of the clients at these positions, and what was sent."""
        return fold(self.train(server, deal(self.clients.sizes.tolist(), positions, self.chunk), plan, rng))

    def train(self, server: Arrays, chunks: Sequence[Sequence[int]], plan: Plan, rng: Randomness) -> Iterator[Sums]:
        """The sums of the chunks, in their order, each as soon as it and those before it are there."""
        labels = self._show(server)
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
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    worker, k = busy.pop(pipe)
                    sums = self._receive(worker)
                    if sums is None:
                        waiting.append(k)
                        self._bury(worker)
                    else:
                        done[k] = sums
            yield done.pop(next_)

    def _show(self, server: Arrays) -> list[Label]:
        """Put the server's arrays where the workers see them; the workers begin here, and anew where the room is too small."""
        if self._server is None or shelf.size(server) > self._server.capacity:
            self.close()
            self._server = Shelf(2 * shelf.size(server))
            for _ in range(self.count):
                self._workers.append(self._fork(self._server))
        return self._server.put(server)

    def _fork(self, server: Shelf) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        sums = Shelf(4 * server.capacity)  # float64, and some algorithms sum more than they send
        executor = InProcess(self.problem, self.algorithm, self.clients, ClientStore(), self.chunk)
        others = [ours, *(w.pipe for w in self._workers)]
        process = context.Process(target=_work, args=(theirs, others, executor, server, sums), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, sums)

    def _memories(self, positions: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
        ids = [int(self.clients.ids[k]) for k in positions]
        return {i: _pack(self.store.memories[i]) for i in ids if i in self.store.memories}

    def _send(self, worker: Worker, task: object) -> None:
        with contextlib.suppress(OSError):  # it is dead, and found so when its answer is read
            worker.pipe.send(task)

    def _receive(self, worker: Worker) -> Sums | None:
        """A chunk's sums, or None where the worker has died."""
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):  # before its answer, or in the middle of it
            return None
        if isinstance(answer, Exception):
            raise answer
        labels, summary, traffic, memories = answer
        for client, memory in memories.items():
            self.store.put([client], {key: value.unsqueeze(0) for key, value in _unpack(memory).items()})
        found = _unpack(summary) if labels is None else {k: v.clone() for k, v in worker.sums.get(labels).items()}
        return found, traffic

    def _bury(self, worker: Worker) -> None:
        """Go on with the others."""
        worker.process.join()
        self._workers.remove(worker)
        if not self._workers:
            raise RuntimeError(
                f"all worker processes died, the last with exit code {worker.process.exitcode} (-9: out of memory?): "
                "resume the run, with fewer workers"
            )
        log.warning("a worker process died (exit code %s); the others go on with its clients", worker.process.exitcode)

    def close(self) -> None:
        """Stop the workers, which hold nothing that is not here."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
            worker.process.join()
        self._workers, self._server = [], None


def _pack(arrays: Arrays) -> dict[str, np.ndarray]:
    """For a pipe: tensors would go through shared memory, with an open file for each of them."""
    return {key: value.cpu().numpy() for key, value in arrays.items()}


def _unpack(arrays: dict[str, np.ndarray]) -> Arrays:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}


def _work(pipe: Connection, others: Sequence[Connection], executor: InProcess, server: Shelf, sums: Shelf) -> None:
    for other in others:  # copies of the parent's ends: a worker must see when the parent closes its own
        other.close()
    torch.set_num_threads(1)
    keep()
    parent = os.getppid()
    while True:
        try:
            while not pipe.poll(timeout=2.0):
                if os.getppid() != parent:
                    return
            labels, share, memories, plan, rng = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        store = executor.store = ClientStore()
        store.memories = {client: _unpack(memory) for client, memory in memories.items()}
        try:
            summary, traffic = executor.train(server.get(labels), share, plan, rng)
            store.commit()
            changed = {i: _pack(store.memories[i]) for i in store.changed}
            fits = shelf.size(summary) <= sums.capacity
            answer = (sums.put(summary), None) if fits else (None, _pack(summary))
            reply: object = (*answer, traffic, changed)
        except KeyboardInterrupt:
            return
        except (DivergedError, InputError) as error:
            reply = error
        except Exception:  # a user's model, likelihood or algorithm: said as it is, not tried again
            reply = RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
        try:
            pipe.send(reply)
        except (OSError, KeyboardInterrupt):
            return
