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
        group: the kind of each example [n], such as its corruption: a position in `Dataset.groups`; or None.
        original: what each example was made from [n]: copies of one image have the same number; or None.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    group: np.ndarray | None = None
    original: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: np.ndarray) -> Examples:
        """These examples, with all that is known of them."""
        client, group, original = (
            None if v is None else v[rows] for v in (self.client, self.group, self.original)
        )
        return Examples(self.x[rows], self.y[rows], client, group, original)


@dataclass(frozen=True)
class Dataset:
    """Training and test examples.

    Attributes:
        name: as it is asked for.
        train, test: the examples; all are in `train` where a partition by groups is to split them.
        num_classes: None for regression.
        files: hash of every file that was read.
        title: as results call it, where that is not its name.
        groups: the names of the kinds of examples, where there are kinds.
        num_novel: so many of them, the last, are for clients that never train.
        drawn: the share of rows that were drawn for testing, where the data do not say which are.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int | None
    files: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    groups: tuple[str, ...] = ()
    num_novel: int = 0
    drawn: float = 0.0
