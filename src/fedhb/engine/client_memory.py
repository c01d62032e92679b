"""The memories of clients between rounds, by client id.

A round's memories count only once the round is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.clients.clients import Clients
from fedhb.errors import InputError


class ClientStore:
    """Memories of the clients that took part; the others have the algorithm's initial memory."""

    def __init__(self) -> None:
        self.memories: dict[int, Arrays] = {}
        self.changed: set[int] = set()  # since the last checkpoint
        # where the last checkpoint keeps each memory, and its hash
        self.files: dict[int, tuple[str, str]] = {}
        self._pending: dict[int, Arrays] = {}

    def load(self, algorithm: Algorithm, problem: Problem, clients: Clients) -> Arrays:
        """Return the memory [C, ...] of these clients."""
        initial = algorithm.remember(problem, clients)
        ids = clients.ids.tolist()
        for i in self.memories.keys() & set(ids):
            shapes = {key: v.shape for key, v in self.memories[i].items()}
            if shapes != {key: v.shape[1:] for key, v in initial.items()}:
                raise InputError(
                    f"the stored memory of client {i} does not fit the algorithm: restore the "
                    "checkpoint"
                )
        kept = [self.memories.get(i) for i in ids]
        return {
            key: torch.stack(
                [
                    value[k] if memory is None else memory[key].to(value.device)
                    for k, memory in enumerate(kept)
                ]
            )
            for key, value in initial.items()
        }

    def put(self, ids: Sequence[int], memory: Arrays) -> None:
        """Hold the memories of these clients until the round is done."""
        if memory:
            for k, i in enumerate(ids):
                self._pending[i] = {key: value[k].clone() for key, value in memory.items()}

    def commit(self) -> None:
        """Let the memories of the round count, which is done."""
        self.memories.update(self._pending)
        self.changed.update(self._pending)
        self._pending = {}
