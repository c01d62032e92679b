"""What clients remember between rounds, keyed by client id. A round's memories count only once the round is done."""

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
        self.files: dict[
            int, tuple[str, str]
        ] = {}  # where the last checkpoint keeps each memory, and its hash
        self._pending: dict[int, Arrays] = {}

    def load(self, algorithm: Algorithm, problem: Problem, clients: Clients) -> Arrays:
        """The memory [C, ...] of these clients."""
        initial = algorithm.remember(problem, clients)
        ids = clients.ids.tolist()
        for i in self.memories.keys() & set(ids):
            if {key: v.shape for key, v in self.memories[i].items()} != {
                key: v.shape[1:] for key, v in initial.items()
            }:
                raise InputError(
                    f"what is stored of client {i}'s memory does not fit the algorithm: restore the checkpoint"
                )
        kept = [self.memories.get(i) for i in ids]
        return {
            key: torch.stack(
                [
                    value[k] if mine is None else mine[key].to(value.device)
                    for k, mine in enumerate(kept)
                ]
            )
            for key, value in initial.items()
        }

    def put(self, ids: Sequence[int], memory: Arrays) -> None:
        """Hold what these clients remember of the round under way."""
        if memory:
            for k, i in enumerate(ids):
                self._pending[i] = {key: value[k].clone() for key, value in memory.items()}

    def commit(self) -> None:
        """The round is done: its memories count."""
        self.memories.update(self._pending)
        self.changed.update(self._pending)
        self._pending = {}
