"""Trains a cohort in this process: chunks of clients go in, and sums come out.

A cohort is dealt into chunks, and the sums of the chunks are added in their order. Which process
computes a chunk does not matter: one or several give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedhb.algorithms.contract import Algorithm, Arrays, Problem, Steps
from fedhb.algorithms.toolbox import answer_bytes, received_bytes
from fedhb.answers.admission import admit
from fedhb.clients.clients import Clients
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Sums, Traffic, chunk_size, deal, fold
from fedhb.engine.timetable import Timetable
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan


class InProcess:
    """Trains a cohort chunk by chunk.

    Memory is O(chunk d) for the clients and O(d) for the sums.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        store: ClientStore,
        chunk: int | None = None,
        timetable: Timetable | None = None,
    ):
        self.problem, self.algorithm, self.clients, self.store = problem, algorithm, clients, store
        self.timetable = timetable
        self.chunk = len(clients) if algorithm.pools else chunk or chunk_size(problem.network)

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the summed statistics of the clients at these positions, and what was sent."""
        chunks = deal(self.clients.sizes.tolist(), positions, self.chunk)
        return fold(self.train(server, part, plan, rng) for part in chunks)

    def train(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the sums of one chunk of clients, and what was sent."""
        clients = self.clients.select(positions)
        ids = clients.ids.tolist()
        stage = self.timetable.stage(rng.round) if self.timetable is not None else None
        steps: Steps = stage.steps if stage is not None else self.algorithm
        received = steps.broadcast(server, ids)
        memory = self.store.load(self.algorithm, self.problem, clients)
        answers, memory = steps.local_update(self.problem, received, clients, memory, plan, rng)
        admit(answers, steps.answer, ids[:1] if steps.pools else ids, rng.round)
        self.store.put(ids, memory)
        traffic = Traffic()
        if steps.sends:
            down = received_bytes(steps, received, len(ids))
            traffic = Traffic(down, answer_bytes(steps, answers))
        return steps.summarise(self.problem, received, answers, rng), traffic

    def close(self) -> None:
        """Release nothing: this executor holds nothing."""
