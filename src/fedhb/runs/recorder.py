"""Keeps a run on disk while it goes: the record of every round, and checkpoints."""

from __future__ import annotations

from typing import Any

from fedhb.algorithms.contract import Arrays
from fedhb.engine.loop import Callback, State
from fedhb.runs import checkpoint
from fedhb.runs.folder import RunFolder, number_of


class Recorder(Callback):
    """Writes rounds.jsonl and checkpoints, also when the run is interrupted.

    Args:
        folder: where they are written; None keeps the records in memory alone.
        constants: the network as it was made.
        trained: the hash of what training depends on.
        every: rounds between checkpoints.
    """

    def __init__(self, folder: RunFolder | None, constants: Arrays, trained: str, every: int):
        self.folder, self.constants, self.trained, self.every = folder, constants, trained, every
        self.records: list[dict[str, Any]] = []
        self._rounds = 0
        self._unsaved: State | None = None

    def on_start(self, done: int, rounds: int) -> None:
        """Note how many rounds there are."""
        self._rounds = rounds

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Keep the record, and every `every` rounds the state."""
        if self.folder is not None:
            self.folder.append_round(record)
        self.records.append(record)
        self._unsaved = state
        if state.done % self.every == 0 or record["round"] == self._rounds:
            self._save()

    def on_phase(self, record: dict[str, Any], state: State) -> None:
        """Keep the record and the state: a phase may ask all clients, so it is not asked again."""
        self.on_round(record, state)
        self._save()

    def on_end(self) -> None:
        """Keep the last whole round where training stopped between two checkpoints."""
        if self._unsaved is not None and self._unsaved.done == number_of(self.records[-1]):
            self._save()

    def _save(self) -> None:
        if self.folder is not None and self._unsaved is not None:
            state, self._unsaved = self._unsaved, None
            records = self.folder.settle_rounds()
            checkpoint.save(self.folder.checkpoints, state, self.constants, self.trained, records)
