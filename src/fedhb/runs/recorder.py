"""What a run keeps on disk while it goes: the record of every round, and checkpoints that only the same run can resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.clients.clients import Clients
from fedhb.runs import checkpoint
from fedhb.runs.folder import RunFolder
from fedhb.engine.loop import Callback, State, Training
from fedhb.seeding import absorb


class Keeper(Callback):
    """The callback that writes rounds.jsonl and checkpoints; also when the run is interrupted."""

    def __init__(
        self,
        folder: RunFolder | None,
        constants: Arrays,
        fingerprint: str,
        every: int,
        rounds: int,
        records: list[dict[str, Any]],
    ):
        self.folder, self.constants, self.fingerprint, self.every, self.rounds = (
            folder,
            constants,
            fingerprint,
            every,
            rounds,
        )
        self.records = records
        self._state: State | None = None

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Keep the record, and every `every` rounds the state."""
        if self.folder is not None:
            self.folder.append_round(record)
        self.records.append(record)
        self._state = state
        if state.done % self.every == 0 or state.done == self.rounds:
            self._save()

    def on_end(self) -> None:
        """Keep the last whole round where training stopped between two checkpoints."""
        if self._state is not None and self._state.done == self.records[-1]["round"]:
            self._save()

    def _save(self) -> None:
        if self.folder is not None and self._state is not None:
            state, self._state = self._state, None
            records = self.folder.settle_rounds()
            checkpoint.save(self.folder.checkpoints, state, self.constants, self.fingerprint, records)


def fingerprint_of(problem: Problem, algorithm: Any, training: Training, clients: Clients, *more: Any) -> str:
    """A hash of everything that training depends on: a checkpoint goes on only under the same one."""
    network = problem.network
    digest = hashlib.sha256()
    slots = [[(s.name, list(s.shape)) for s in part] for part in (network.body_slots, network.head_slots, network.buffer_slots)]
    likelihood = problem.likelihood
    about = [
        algorithm.name,
        dataclasses.asdict(algorithm),
        dataclasses.asdict(training),
        slots,
        sorted(clients.files.items()),
        network.batch_norm,
        str(network.module),
        repr(likelihood) if dataclasses.is_dataclass(likelihood) else type(likelihood).__qualname__,
        clients.augment,
        clients.num_classes,
        *more,
    ]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    share = clients.train
    tensors = [*network.constants().values(), network.scaling.mean, network.scaling.std, share.rows, share.offsets, share.y]
    if clients.server_inputs is not None:
        tensors.append(clients.server_inputs)
    absorb(digest, [*tensors, share.x])  # the inputs too where files are known: they may have been changed since
    return digest.hexdigest()
