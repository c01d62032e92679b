"""Arrays in memory that a process shares with those it forks: written once, read by all, without a file or a name.

The memory is anonymous: it is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from fedhb.algorithms.contract import Arrays

ALIGN = 64

Label = tuple[str, str, tuple[int, ...], int]
"""Where an array lies: its key, type, shape and offset."""


def size(arrays: Arrays) -> int:
    """The bytes that a shelf needs for these."""
    return sum(-(-a.numel() * a.element_size() // ALIGN) * ALIGN for a in arrays.values())


class Shelf:
    """Room for `capacity` bytes of arrays."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._memory = mmap.mmap(-1, max(capacity, 1))

    def put(self, arrays: Arrays) -> list[Label]:
        """Write the arrays over whatever was here; their labels tell another process where they are."""
        labels, offset = [], 0
        for key, value in arrays.items():
            source = value.cpu().numpy()
            self._view(source.dtype.str, source.shape, offset)[...] = source
            labels.append((key, source.dtype.str, source.shape, offset))
            offset += -(-source.nbytes // ALIGN) * ALIGN
        return labels

    def get(self, labels: list[Label]) -> Arrays:
        """The arrays themselves, which change with what is put here next."""
        return {
            key: torch.from_numpy(self._view(kind, shape, offset))
            for key, kind, shape, offset in labels
        }

    def _view(self, kind: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._memory, dtype=kind, count=count, offset=offset).reshape(shape)
