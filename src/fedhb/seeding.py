"""Randomness without state: every random choice has its own generator.

It is derived from the client, the round and the purpose. So a run can stop after any round and go
on with the same numbers, and clients may run in any order, grouping or process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SERVER = -1
"""The client id that stands for the server."""


def derive(*parts: object) -> int:
    """Return a 63-bit seed from any values; equal values give equal seeds on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Randomness:
    """The randomness of one round: `rng(client, purpose)` is a new generator each time."""

    seed: int
    round: int = 0

    def __call__(self, client: int, purpose: str) -> torch.Generator:
        """Return the generator of this client (or `SERVER`) for this purpose."""
        return torch.Generator().manual_seed(derive(self.seed, self.round, client, purpose))


def absorb(digest: Any, tensors: Iterable[Tensor]) -> None:
    """Add tensors, with their shapes and types, to a hash."""
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{values.dtype}{values.shape}".encode())
        # without a copy: images may have half a gigabyte
        digest.update(values.reshape(-1).view(np.uint8))
