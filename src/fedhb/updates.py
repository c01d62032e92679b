"""The one gate that every client's answer passes before it enters a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays
from fedhb.errors import DivergedError


def check_personal(weights: Tensor, ids: Sequence[int]) -> None:
    """Refuse personal posteriors [C, M, d] that are not finite."""
    finite = torch.isfinite(weights.flatten(1).sum(1, dtype=torch.float64))
    if not finite.all():
        client = ids[int((~finite).nonzero()[0])]
        raise DivergedError(f"personalisation of client {client} diverges: lower the learning rate of personalisation")


def admit(found: Arrays, ids: Sequence[int], round_number: int) -> Arrays:
    """The answers [C, ...] of these clients, after a check that each has its own row and every number is finite."""
    for key, value in found.items():
        if len(value) != len(ids):
            raise DivergedError(f"round {round_number}: {len(ids)} clients answered, but {key!r} has {len(value)} rows")
        # one pass: a NaN or an infinity makes its row's sum one, and no float64 sum of finite float32 numbers overflows
        finite = torch.isfinite(value.reshape(len(ids), -1).sum(1, dtype=torch.float64))
        if not finite.all():
            client = ids[int((~finite).nonzero()[0])]
            raise DivergedError(
                f"round {round_number}: client {client} sent {key!r} with NaN or infinity: training diverges; "
                "lower the learning rate or the momentum"
            )
    return found
