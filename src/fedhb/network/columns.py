"""The columns of a network's weight matrices, which dropout removes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

INPUTS_FIRST = (_ConvTransposeNd, nn.Embedding, nn.EmbeddingBag)
"""Layers whose weight has its inputs on the first axis; elsewhere they are on the second."""

NORMALISATIONS = (nn.LayerNorm, nn.RMSNorm)
"""Layers whose weight may have two axes, and is no matrix."""

Grid = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A column in the vector of weights: where it begins, its size, and its strides."""


@dataclass(frozen=True)
class Columns:
    """The columns of the body's weight matrices, which dropout removes (eq:spiky2).

    A column holds the weights that leave one input unit. Biases and normalisation weights are in no
    column.
    """

    grids: Sequence[Grid]

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[int, torch.Size, nn.Module]]) -> Columns:
        """Return the columns of tensors: where each begins, its shape, and the layer it is of."""
        grids = []
        for begin, shape, layer in tensors:
            if len(shape) < 2 or isinstance(layer, NORMALISATIONS):
                continue
            weight = torch.empty(shape, device="meta")
            if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd):
                # [out, in / groups, ...]: an input channel feeds the outputs of its own group
                groups = weight.chunk(layer.groups)
                columns = [column for group in groups for column in group.unbind(1)]
            else:
                columns = list(weight.unbind(0 if isinstance(layer, INPUTS_FIRST) else 1))
            grids += [
                (begin + int(column.storage_offset()), tuple(column.shape), column.stride())
                for column in columns
            ]
        return cls(grids)

    def __len__(self) -> int:
        return len(self.grids)

    def of(self, vectors: Tensor, pairs: Iterable[tuple[int, int]]) -> list[Tensor]:
        """Return (client, column) pairs of the clients' vectors [C, d] as views, without a copy."""
        (row, _), first = vectors.stride(), vectors.storage_offset()
        return [
            vectors.as_strided(size, stride, first + client * row + start)
            for client, column in pairs
            for start, size, stride in (self.grids[column],)
        ]

    def drops(self, p_do: float, generator: torch.Generator) -> Iterator[list[int]]:
        """Yield, for each batch, the columns that its mask removes; one is kept with `p_do`.

        The gaps between drops are drawn, in the sequence of all columns of all batches. This is a
        coin for each column, at a fraction of the cost.
        """
        count = len(self)
        while p_do <= 0.0:  # no gaps
            yield list(range(count))
        begin, drop = 0, -1
        gaps: Iterator[float] = iter(())
        while True:
            dropped = []
            while drop < begin + count:
                if drop >= begin:
                    dropped.append(drop - begin)
                gap = next(gaps, None)
                if gap is None:
                    gaps = _geometric(1.0 - p_do, generator)
                    gap = next(gaps)
                drop += int(gap)
            begin += count
            yield dropped


def _geometric(p: float, generator: torch.Generator) -> Iterator[float]:
    """Return some geometric numbers: how many coins of probability p until the first head."""
    numbers = torch.empty(32, dtype=torch.float64).geometric_(p, generator=generator)
    return iter(numbers.tolist())
