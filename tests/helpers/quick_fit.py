"""A run of two rounds."""

from __future__ import annotations

from typing import Any

import torch
from builders import clients, mlp

import fedhb
from fedhb.clients.clients import Clients


def fit(
    model: Any = None, who: Clients | None = None, algorithm: Any = None, **options: Any
) -> Any:
    chosen: dict[str, Any] = {
        "rounds": 2,
        "fraction": 0.5,
        "batch_size": 4,
        "personal_epochs": 1,
        "progress": False,
    } | options
    return fedhb.fit(
        model or mlp(torch.float32), who if who is not None else clients(), algorithm, **chosen
    )
