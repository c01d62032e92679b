"""Runs a cohort: chunks of clients go through the algorithm's client update, and only sums come back."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass
class Traffic:
    """Bytes sent to and by clients."""

    down: int = 0
    up: int = 0


def chunk_size(network: Network) -> int:
    """How many clients to train at once: one where the network does not know the client axis."""
    return max(1, min(64, CHUNK_FLOATS // network.num_params)) if network.batches_clients else 1


class InProcess:
    """The cohort in this process, chunk by chunk. Memory is O(chunk d) for the clients and O(d) for the sums."""

    def __init__(self, problem: Problem, algorithm: Algorithm, clients: Clients, store: ClientStore, chunk: int | None = None):
        self.problem, self.algorithm, self.clients, self.store = problem, algorithm, clients, store
        self.chunk = len(clients) if algorithm.pools else chunk or chunk_size(problem.network)

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> tuple[Arrays, Traffic]:
        """The summed statistics of the clients at these positions, and what was sent."""
        total: Arrays | None = None
        traffic = Traffic()
        # large clients first: a chunk's clients are then of like size, and those still active are always the first ones
        ordered = sorted(positions, key=lambda k: (-int(self.clients.sizes[k]), k))
        for start in range(0, len(ordered), self.chunk):
            clients = self.clients.select(ordered[start : start + self.chunk])
            ids = clients.ids.tolist()
            received = self.algorithm.broadcast(server, ids)
            memory = self.store.load(self.algorithm, self.problem, clients)
            found, memory = self.algorithm.local_update(self.problem, received, clients, memory, plan, rng)
            answering = ids[:1] if self.algorithm.pools else ids
            admit(found, answering, rng.round)
            self.store.put(ids, memory)
            total = add(total, self.algorithm.summarise(self.problem, received, found, rng))
            if not self.algorithm.sends:
                continue
            common = {key: value for key, value in received.items() if key not in self.algorithm.each}
            own = {key: value for key, value in received.items() if key in self.algorithm.each}
            traffic.down += num_bytes(common) * len(ids) + num_bytes(own)
            traffic.up += num_bytes(found)
        assert total is not None
        return total, traffic

    def close(self) -> None:
        """Nothing to release."""
