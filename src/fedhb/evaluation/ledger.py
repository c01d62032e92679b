"""Metrics of clients that are evaluated already, so that an evaluation that is killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhb.clients import Clients


class Ledger:
    """A file with a JSON line for clients that were personalised together.

    Args:
        path: the file; it may be shared by several evaluations.
        about: all that the numbers depend on besides the clients' examples; lines of anything else are passed over.
        clients: who is evaluated.
        split: on what.
    """

    def __init__(self, path: Path, about: Sequence[Any], clients: Clients, split: str):
        digest = hashlib.sha256(json.dumps([*about, split, sorted(clients.files.items())], default=str).encode())
        for share in (clients.train, getattr(clients, split)):
            for tensor in (share.rows, share.offsets, share.y, *([] if clients.files else [share.x])):
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        self.path, self.mark = path, digest.hexdigest()
        self._known: dict[tuple[int, ...], list[dict[str, float]]] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a crash cut it short
                continue
            if record["mark"] == self.mark:
                self._known[tuple(record["clients"])] = record["metrics"]

    @property
    def begun(self) -> bool:
        """Whether some clients were evaluated before."""
        return bool(self._known)

    def find(self, ids: Sequence[int]) -> list[dict[str, float]] | None:
        """The metrics of these clients, if they were evaluated together."""
        return self._known.get(tuple(ids))

    def keep(self, ids: Sequence[int], metrics: Sequence[dict[str, float]]) -> None:
        """Theirs, on disk when this returns."""
        line = json.dumps({"mark": self.mark, "clients": list(ids), "metrics": list(metrics)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # begins a line of its own, whatever a crash left
            file.flush()
            os.fsync(file.fileno())
