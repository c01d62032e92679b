"""The columns of a network, from their description."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.network.columns import Columns


def members(columns: Columns) -> list[Tensor]:
    """The coordinates of every column."""
    last = max(
        (
            start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            for start, size, stride in columns.grids
        ),
        default=0,
    )
    places = torch.arange(last + 1).unsqueeze(0)
    return [
        column.flatten() for column in columns.of(places, [(0, g) for g in range(len(columns))])
    ]
