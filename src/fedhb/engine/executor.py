"""Runs a cohort: chunks of clients go through the algorithm's client update, and only sums come back.

A cohort is dealt into chunks, and the sums of the chunks are added in their order. Who computes a chunk does not matter: one
process or several give the same numbers, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedhb.algorithms.base import Algorithm, Arrays, Plan, Problem
from fedhb.algorithms.sums import add, num_bytes
from fedhb.clients import Clients
from fedhb.engine.store import ClientStore
from fedhb.network import Network
from fedhb.seeding import Randomness
from fedhb.updates import admit

CHUNK_FLOATS = 2**21
"""Clients are batched while their weights together stay in this many numbers: beyond a core's cache the gain is lost."""

MOST = 64
"""Clients in a chunk, however small their network: their batches are in memory at once."""

SUM_FLOATS, SUM_MOST = 2**25, 8
"""Clients whose network does not know the client axis gain nothing in a chunk but their sums: as many as these numbers hold."""


@dataclass
class Traffic:
    """Bytes sent to and by clients."""

    down: int = 0
    up: int = 0


Sums = tuple[Arrays, Traffic]
"""What a chunk or a cohort comes to: its summed statistics, and what was sent."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunk_size(network: Network, count: int = MOST, parts: int = 1) -> int:
    """How many of `count` clients make a chunk: so many that the work can be shared by `parts` cores in equal chunks."""
    if network.batches_clients:
        most = max(1, min(MOST, CHUNK_FLOATS // network.num_params))
    else:
        most = max(1, min(SUM_MOST, SUM_FLOATS // network.num_params))
    chunks = -(-count // most)
    chunks = min(count, -(-chunks // parts) * parts)
    return -(-count // chunks)


def deal(sizes: Sequence[int], positions: Sequence[int], chunk: int) -> list[list[int]]:
    """The clients at these positions in chunks of nearly equal length, large clients first.

    A chunk's clients are then of like size, and those still active are always the first ones.
    """
    ordered = sorted(positions, key=lambda k: (-sizes[k], k))
    count = -(-len(ordered) // chunk)
    return [ordered[j * len(ordered) // count : (j + 1) * len(ordered) // count] for j in range(count)]


def fold(parts: Iterable[Sums]) -> Sums:
    """The sum of the chunks' sums, in their order."""
    total: Arrays | None = None
    traffic = Traffic()
    for summary, sent in parts:
        total = add(total, summary)
        traffic = Traffic(traffic.down + sent.down, traffic.up + sent.up)
    assert total is not None
    return total, traffic


class InProcess:
    """The cohort in this process, chunk by chunk. Memory is O(chunk d) for the clients and O(d) for the sums."""

    def __init__(self, problem: Problem, algorithm: Algorithm, clients: Clients, store: ClientStore, chunk: int | None = None):
        self.problem, self.algorithm, self.clients, self.store = problem, algorithm, clients, store
        self.chunk = len(clients) if algorithm.pools else chunk or chunk_size(problem.network)

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """The summed statistics of the clients at these positions, and what was sent."""
        chunks = deal(self.clients.sizes.tolist(), positions, self.chunk)
        return fold(self.train(server, part, plan, rng) for part in chunks)

    def train(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """The same for one chunk."""
        clients = self.clients.select(positions)
        ids = clients.ids.tolist()
        received = self.algorithm.broadcast(server, ids)
        memory = self.store.load(self.algorithm, self.problem, clients)
        found, memory = self.algorithm.local_update(self.problem, received, clients, memory, plan, rng)
        answering = ids[:1] if self.algorithm.pools else ids
        admit(found, answering, rng.round)
        self.store.put(ids, memory)
        traffic = Traffic()
        if self.algorithm.sends:
            common = {key: value for key, value in received.items() if key not in self.algorithm.each}
            own = {key: value for key, value in received.items() if key in self.algorithm.each}
            traffic = Traffic(num_bytes(common) * len(ids) + num_bytes(own), num_bytes(found))
        return self.algorithm.summarise(self.problem, received, found, rng), traffic

    def close(self) -> None:
        """Nothing to release."""
