"""A data set as it is read from files: examples, labels, and the hashes of the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Inputs and targets of one split.

    Attributes:
        x: inputs [n, ...]; uint8 as stored in image files (channels first), or floating point.
        y: integer class labels [n], or real targets [n] or [n, q].
        client: who holds each example [n] (a natural partition), or None.
        group: the kind of each example [n], such as its corruption, as a position in
            `Dataset.groups`; or None.
        original: the number of the image that each example was made from [n]; copies of one image
            have the same number; or None.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    group: np.ndarray | None = None
    original: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: np.ndarray) -> Examples:
        """Return the examples of these rows, with their clients, groups and originals."""
        client, group, original = (
            None if v is None else v[rows] for v in (self.client, self.group, self.original)
        )
        return Examples(self.x[rows], self.y[rows], client, group, original)


@dataclass(frozen=True)
class Dataset:
    """Training and test examples.

    Attributes:
        name: the name by which `load` knows it.
        train, test: the examples; all are in `train` if a partition by groups will split them.
        num_classes: the number of classes, or None for regression.
        files: the hash of every file that was read.
        title: the name in results, if it is another than `name`; else "".
        groups: the names of the kinds of examples, if there are kinds.
        num_novel: how many of the groups, the last ones, are for clients that never train.
        drawn: the share of rows that were drawn for testing; 0 if the data mark the test rows.
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
