"""The one gate that every client's answer passes before it enters a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays
from fedhb.errors import DivergedError


def check_personal(weights: Tensor, ids: Sequence[int]) -> None:
    """Refuse personal posteriors [C, M, d] that are not finite."""
    client = _not_finite(weights)
    if client is not None:
        raise DivergedError(f"personalisation of client {ids[client]} diverges: lower the learning rate of personalisation")


def admit(found: Arrays, ids: Sequence[int], round_number: int) -> Arrays:
    """The answers [C, ...] of these clients, after a check that each has its own row and every number is finite."""
    for key, value in found.items():
        if len(value) != len(ids):
            raise DivergedError(f"round {round_number}: {len(ids)} clients answered, but {key!r} has {len(value)} rows")
        client = _not_finite(value)
        if client is not None:
            raise DivergedError(
                f"round {round_number}: client {ids[client]} sent {key!r} with NaN or infinity: training diverges; "
                "lower the learning rate or the momentum"
            )
    return found


def _not_finite(values: Tensor) -> int | None:
    """The first row of values [C, ...] with a NaN or an infinity."""
    rows = values.reshape(len(values), -1)
    suspects = ~torch.isfinite(rows.sum(1))  # one fast pass; large numbers may overflow their sum, so look again
    for c in suspects.nonzero().flatten().tolist():
        if not torch.isfinite(rows[c]).all():
            return int(c)
    return None
