"""The cohort on several worker processes: each trains its share of the clients and sends back partial sums.

The workers are forked with the problem and the clients' data, so that nothing but the server's arrays goes down and nothing but
sums (and the memories of clients that have any) comes back. The numbers are those of `InProcess`, up to the order of sums.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch

from fedhb.algorithms.base import Algorithm, Arrays, Plan, Problem
from fedhb.algorithms.sums import add
from fedhb.clients import Clients
from fedhb.engine.executor import InProcess, Traffic
from fedhb.engine.store import ClientStore
from fedhb.errors import DivergedError, InputError
from fedhb.seeding import Randomness


class Workers:
    """An executor that deals a cohort to `count` processes with one thread each."""

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
        self.store, self.sizes, self.ids = store, clients.sizes.tolist(), clients.ids.tolist()
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, problem, algorithm, clients, chunk), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> tuple[Arrays, Traffic]:
        """The summed statistics of the clients at these positions, and what was sent."""
        ordered = sorted(positions, key=lambda k: (-self.sizes[k], k))
        shares = [share for w in range(len(self._pipes)) if (share := ordered[w :: len(self._pipes)])]
        for pipe, share in zip(self._pipes, shares, strict=False):
            known = [self.ids[k] for k in share if self.ids[k] in self.store.memories]
            pipe.send((_pack(server), share, {i: _pack(self.store.memories[i]) for i in known}, plan, rng))
        total: Arrays | None = None
        traffic = Traffic()
        for pipe in self._pipes[: len(shares)]:
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError("a worker process died (out of memory?): resume the run, with fewer workers") from None
            if isinstance(answer, Exception):
                raise answer
            summary, part, memories = answer
            total = add(total, _unpack(summary))
            traffic = Traffic(traffic.down + part.down, traffic.up + part.up)
            for client, memory in memories.items():
                self.store.put([client], {key: value.unsqueeze(0) for key, value in _unpack(memory).items()})
        assert total is not None
        return total, traffic

    def close(self) -> None:
        """Stop the workers, which hold nothing that is not here."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def _pack(arrays: Arrays) -> dict[str, np.ndarray]:
    """For a pipe: tensors would go through shared memory, with an open file for each of them."""
    return {key: value.cpu().numpy() for key, value in arrays.items()}


def _unpack(arrays: dict[str, np.ndarray]) -> Arrays:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}


def _work(pipe: Connection, problem: Problem, algorithm: Algorithm, clients: Clients, chunk: int | None) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    executor = InProcess(problem, algorithm, clients, ClientStore(), chunk)
    while True:
        try:
            while not pipe.poll(timeout=2.0):
                if os.getppid() != parent:
                    return
            server, share, memories, plan, rng = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        executor.store = ClientStore()
        executor.store.memories = {client: _unpack(memory) for client, memory in memories.items()}
        try:
            summary, traffic = executor.run(_unpack(server), share, plan, rng)
            executor.store.commit()
            pipe.send((_pack(summary), traffic, {i: _pack(executor.store.memories[i]) for i in executor.store.changed}))
        except KeyboardInterrupt:
            return
        except (DivergedError, InputError) as error:
            pipe.send(error)
