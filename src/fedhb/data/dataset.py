"""A data set as it comes from files: examples, labels, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Inputs and targets of one split.

    Attributes:
        x: inputs [n, ...], uint8 as stored in image files (channels first), or floating point.
        y: integer class labels [n], or real targets [n] or [n, q].
        client: who holds each example [n] (a natural partition), or None.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Dataset:
    """Training and test examples with the number of classes (None: regression) and the hash of every file read."""

    name: str
    train: Examples
    test: Examples
    num_classes: int | None
    files: Mapping[str, str] = field(default_factory=dict)
