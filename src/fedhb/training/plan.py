"""The settings of a client's training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The settings of a client's training.

    Attributes:
        epochs: tau, the passes through the client's data.
        batch_size: examples of a minibatch.
        lr: learning rate.
        momentum: of SGD; the velocity starts at zero in every round.
        train_head: whether the head is trained too.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    train_head: bool
