"""The one gate that every client's answer passes before it enters a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedhb.algorithms.base import Arrays
from fedhb.errors import DivergedError


def admit(found: Arrays, ids: Sequence[int], round_number: int) -> Arrays:
    """The answers [C, ...] of these clients, after a check that each has its own row and every number is finite."""
    for key, value in found.items():
        if len(value) != len(ids):
            raise DivergedError(f"round {round_number}: {len(ids)} clients answered, but {key!r} has {len(value)} rows")
        finite = torch.isfinite(value).reshape(len(ids), -1).all(1)
        if not finite.all():
            client = ids[int((~finite).nonzero()[0])]
            raise DivergedError(
                f"round {round_number}: client {client} sent {key!r} with NaN or infinity: training diverges; "
                "lower the learning rate or the momentum"
            )
    return found
