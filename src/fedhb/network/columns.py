"""The columns of a network's weight matrices, which dropout removes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The columns of the body's weight matrices, which dropout removes (eq:spiky2): the weights that leave one input unit.

    A column is a grid in the vector of weights: where it begins, its size, and its strides. Biases and normalisation weights are
    in no column.
    """

    grids: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]

    def __len__(self) -> int:
        return len(self.grids)

    def of(self, vectors: Tensor, pairs: Iterable[tuple[int, int]]) -> list[Tensor]:
        """The given (client, column) pairs in the clients' vectors [C, d], as views: nothing is indexed, nothing copied."""
        (row, _), first = vectors.stride(), vectors.storage_offset()
        return [
            vectors.as_strided(size, stride, first + client * row + start)
            for client, column in pairs
            for start, size, stride in (self.grids[column],)
        ]

    def drops(self, p_do: float, generator: torch.Generator) -> Iterator[list[int]]:
        """For one batch after another, the columns that its dropout mask removes; a column is kept with `p_do`.

        Drawn by the gaps between drops in the sequence of all columns of all batches: a coin for each, at a fraction of the cost.
        """
        count = len(self)
        while p_do <= 0.0:  # no gaps
            yield list(range(count))
        begin, drop = 0, -1
        gaps: Iterator[float] = iter(())
        while True:
            found = []
            while drop < begin + count:
                if drop >= begin:
                    found.append(drop - begin)
                gap = next(gaps, None)
                if gap is None:
                    gaps = iter(
                        torch.empty(32, dtype=torch.float64)
                        .geometric_(1.0 - p_do, generator=generator)
                        .tolist()
                    )
                    gap = next(gaps)
                drop += int(gap)
            begin += count
            yield found
