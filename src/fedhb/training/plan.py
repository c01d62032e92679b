"""How a client trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How a client trains: epochs (tau), batch size, learning rate, momentum, and whether the head is trained too."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    train_head: bool
