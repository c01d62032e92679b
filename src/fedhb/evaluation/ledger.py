"""Metrics of clients that are evaluated already, so that an evaluation that is killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhb.clients.clients import Clients
from fedhb.files import sealed, unsealed_text
from fedhb.seeding import absorb


def mark_of(about: Sequence[Any], clients: Clients, split: str) -> str:
    """A hash of these clients' examples, of the split that they are evaluated on, and of what else the numbers depend on."""
    digest = hashlib.sha256(
        json.dumps([*about, split, sorted(clients.files.items())], default=str).encode()
    )
    for share in (clients.train, getattr(clients, split)):
        absorb(digest, [share.rows, share.offsets, share.y, share.x])
    return digest.hexdigest()


class Ledger:
    """A file with a JSON line for clients that were personalised together, each with its checksum.

    Args:
        path: the file; it may be shared by several evaluations.
        about: all that the numbers depend on besides the clients' examples; lines of anything else are passed over.
        clients: who is evaluated.
        split: on what.
    """

    def __init__(self, path: Path, about: Sequence[Any], clients: Clients, split: str):
        self.path, self.mark = path, mark_of(about, clients, split)
        self._known: dict[tuple[int, ...], list[dict[str, float]]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                record = unsealed_text(line)
            except (
                ValueError
            ):  # a crash cut it short, or it was changed: these clients are evaluated again
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
        line = sealed(
            {"mark": self.mark, "clients": list(ids), "metrics": list(metrics)}, indent=None
        )
        with self.path.open("ab") as file:
            file.write(b"\n" + line)  # begins a line of its own, whatever a crash left
            file.flush()
            os.fsync(file.fileno())
