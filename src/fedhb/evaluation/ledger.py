"""Metrics of clients that are evaluated already, from which a killed evaluation goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedhb.clients.clients import Clients
from fedhb.files import sealed, unsealed_text
from fedhb.seeding import absorb
from fedhb.training.plan import Plan


def evaluated_hash(
    trained: str,
    plan: Plan,
    split: str,
    groups: Sequence[Clients] = (),
    unseen: tuple[str, np.ndarray] | None = None,
) -> str:
    """Return a hash of everything that the numbers of an evaluation depend on.

    Args:
        trained: the hash of what training depends on (runs/recorder.py).
        plan: how clients personalise.
        split: the split that is evaluated; empty for none.
        groups: the clients that are evaluated.
        unseen: inputs that are like none of the data, and what they are.
    """
    files = [sorted(clients.files.items()) for clients in groups]
    about = [trained, asdict(plan), split, unseen and unseen[0], files]
    digest = hashlib.sha256(json.dumps(about).encode())
    if unseen is not None:
        digest.update(np.ascontiguousarray(unseen[1]).tobytes())
    for clients in groups if split else ():
        for share in (clients.train, getattr(clients, split)):
            absorb(digest, [share.rows, share.offsets, share.y, share.x])
    return digest.hexdigest()


class Ledger:
    """A file with a JSON line for clients that were personalised together, each with a checksum.

    Args:
        path: the file; it may be shared by several evaluations.
        mark: the hash of what is evaluated; lines with another one are passed over.
    """

    def __init__(self, path: Path, mark: str):
        self.path, self.mark = path, mark
        self._known: dict[tuple[int, ...], list[dict[str, float]]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                record = unsealed_text(line)
            except ValueError:  # cut short by a crash, or changed: its clients are evaluated again
                continue
            if record["mark"] == self.mark:
                self._known[tuple(record["clients"])] = record["metrics"]

    @property
    def holds_some(self) -> bool:
        """Whether some clients were evaluated before."""
        return bool(self._known)

    def find(self, ids: Sequence[int]) -> list[dict[str, float]] | None:
        """Return the metrics of these clients, if they were evaluated together."""
        return self._known.get(tuple(ids))

    def keep(self, ids: Sequence[int], metrics: Sequence[dict[str, float]]) -> None:
        """Add the metrics of these clients; they are on disk when this returns."""
        line = sealed(
            {"mark": self.mark, "clients": list(ids), "metrics": list(metrics)}, indent=None
        )
        with self.path.open("ab") as file:
            file.write(b"\n" + line)  # starts a line of its own, whatever a crash left
            file.flush()
            os.fsync(file.fileno())
