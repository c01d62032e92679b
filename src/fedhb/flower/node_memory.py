"""What a client remembers, in its node's `context.state`, by the round it comes from.

A memory counts once its round does, and that the server decides: it says in which round the client's last answer counted. Two
memories are kept, the one that counted and the newest; that is enough, for the server keeps a checkpoint of every round.
With `keep=FOLDER` in the node's config they are files as well, which outlive the node's process and serve a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, RecordDict

from fedhb.algorithms import Algorithm, Arrays, Problem
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.flower.wire import to_arrays, to_record
from fedhb.runs import checkpoint

PREFIX = "memory-"


class Memory:
    """The memories of one client in one run."""

    def __init__(self, state: RecordDict, config: Mapping[str, Any], run: str):
        self.state = state
        folder = config.get("keep")
        self.folder = (
            Path(str(folder)) / hashlib.sha256(run.encode()).hexdigest()[:16] if folder else None
        )

    def at(
        self, counted: int, algorithm: Algorithm, problem: Problem, clients: Clients
    ) -> tuple[Arrays, bool]:
        """The memory of the round whose answer counted (0: the initial one), and whether it was lost."""
        initial = algorithm.remember(problem, clients)
        if not initial or counted == 0:
            return initial, False
        found = self._find(counted)
        fits = found is not None and {k: v.shape for k, v in found.items()} == {
            k: v.shape for k, v in initial.items()
        }
        return (found, False) if found is not None and fits else (initial, True)

    def put(self, round_number: int, counted: int, memory: Arrays) -> None:
        """Keep this round's memory beside the one that counted; forget the others."""
        if not memory:
            return
        name = f"{PREFIX}{round_number}"
        self.state[name] = to_record(memory)
        for key in [
            k for k in self.state if k.startswith(PREFIX) and k not in (name, f"{PREFIX}{counted}")
        ]:
            del self.state[key]
        if self.folder is not None:
            checkpoint.write_arrays(self.folder / f"{name}.safetensors", memory)
            for path in self.folder.glob(f"{PREFIX}*.safetensors"):
                if path.stem not in (name, f"{PREFIX}{counted}"):
                    path.unlink(missing_ok=True)

    def _find(self, counted: int) -> Arrays | None:
        record = self.state.get(f"{PREFIX}{counted}")
        if isinstance(record, ArrayRecord):
            return to_arrays(record)
        path = self.folder / f"{PREFIX}{counted}.safetensors" if self.folder is not None else None
        try:
            return checkpoint.read_arrays(path) if path is not None and path.exists() else None
        except InputError:  # damaged: as good as lost, and the client begins anew
            return None
