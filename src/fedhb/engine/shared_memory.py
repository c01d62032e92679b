"""Arrays in memory that a process shares with its forks: written once, read by all.

The memory is anonymous: it is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from fedhb.algorithms.contract import Arrays

ALIGN = 64

Label = tuple[str, str, tuple[int, ...], int]
"""The place of an array: its key, type, shape and offset."""


def size(arrays: Arrays) -> int:
    """Return the bytes that a shelf needs for these arrays."""
    return sum(-(-a.numel() * a.element_size() // ALIGN) * ALIGN for a in arrays.values())


class Shelf:
    """Shared memory with room for `capacity` bytes of arrays."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._memory = mmap.mmap(-1, max(capacity, 1))

    def put(self, arrays: Arrays) -> list[Label]:
        """Write the arrays over the earlier content; return the labels by which they are read."""
        labels, offset = [], 0
        for key, value in arrays.items():
            source = value.cpu().numpy()
            self._view(source.dtype.str, source.shape, offset)[...] = source
            labels.append((key, source.dtype.str, source.shape, offset))
            offset += -(-source.nbytes // ALIGN) * ALIGN
        return labels

    def get(self, labels: list[Label]) -> Arrays:
        """Return the arrays themselves, which change with the next `put`."""
        return {
            key: torch.from_numpy(self._view(kind, shape, offset))
            for key, kind, shape, offset in labels
        }

    def _view(self, kind: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._memory, dtype=kind, count=count, offset=offset).reshape(shape)
