"""The memories of a client, in its node's `context.state`, by the round they come from.

A memory counts once its round does. The server decides that: it says in which round the client's
last answer counted. Two memories are kept, the one that counted and the newest; that is enough,
because the server keeps a checkpoint of every round. With `keep=FOLDER` in the node's config they
are files as well, which outlive the node's process and serve a resumed run.
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
        """Return the memory of the round that counted (0: the initial), and whether it was lost."""
        initial = algorithm.remember(problem, clients)
        if not initial or counted == 0:
            return initial, False
        memory = self._find(counted)
        shapes = {key: value.shape for key, value in initial.items()}
        if memory is None or {key: value.shape for key, value in memory.items()} != shapes:
            return initial, True
        return memory, False

    def put(self, round_number: int, counted: int, memory: Arrays) -> None:
        """Keep this round's memory beside the one that counted; remove the others."""
        if not memory:
            return
        name = f"{PREFIX}{round_number}"
        self.state[name] = to_record(memory)
        kept = name, f"{PREFIX}{counted}"
        for key in [k for k in self.state if k.startswith(PREFIX) and k not in kept]:
            del self.state[key]
        if self.folder is not None:
            checkpoint.write_arrays(self.folder / f"{name}.safetensors", memory)
            for path in self.folder.glob(f"{PREFIX}*.safetensors"):
                if path.stem not in kept:
                    path.unlink(missing_ok=True)

    def _find(self, counted: int) -> Arrays | None:
        record = self.state.get(f"{PREFIX}{counted}")
        if isinstance(record, ArrayRecord):
            return to_arrays(record)
        path = self.folder / f"{PREFIX}{counted}.safetensors" if self.folder is not None else None
        try:
            return checkpoint.read_arrays(path) if path is not None and path.exists() else None
        except InputError:  # damaged, which is the same as lost: the client starts anew
            return None
