"""How inputs are scaled before they go into a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """The map from an input x to (x - mean) * (1 / std); mean and std broadcast to one example."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    std: Tensor = field(default_factory=lambda: torch.ones(()))

    @classmethod
    def fit(cls, x: np.ndarray) -> Scaling:
        """Compute the mean and the standard deviation of a pool of inputs.

        Tables [n, f] have one of each per feature, images [n, c, h, w] one per channel, all other
        inputs a single one.
        """
        axes = {2: (0,), 4: (0, 2, 3)}.get(x.ndim, tuple(range(x.ndim)))
        if x.dtype == np.uint8 and x.ndim == 4:
            # Count the 256 values of a pixel: converting all pixels to floats takes more memory.
            # The pool goes in parts, because bincount makes its input eight times as large.
            counts = np.zeros((x.shape[1], 256), dtype=np.int64)
            for part in np.array_split(x, len(x) // 4096 + 1):
                counts += [
                    np.bincount(part[:, c].ravel(), minlength=256) for c in range(x.shape[1])
                ]
            values = np.arange(256.0)
            mean = counts @ values / counts.sum(1)
            std = np.sqrt(counts @ values**2 / counts.sum(1) - mean**2)
        else:
            mean, std = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
        std = np.where(std > 1e-12, std, 1.0)  # a constant feature becomes 0, not 0 / 0
        shape = (-1, 1, 1) if x.ndim == 4 else mean.shape
        return cls(
            torch.tensor(mean, dtype=torch.float32).reshape(shape),
            torch.tensor(std, dtype=torch.float32).reshape(shape),
        )

    @property
    def is_identity(self) -> bool:
        """Whether the scaling changes no input."""
        return self.mean.ndim == 0 and self.mean.item() == 0 and self.std.item() == 1

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scaled inputs in this type."""
        scaled = x.to(dtype)
        if self.is_identity:
            return scaled
        mean, factor = self.mean.to(dtype), self._factor.to(dtype)
        # In place, unless x has this type already and is therefore no copy.
        return (scaled.sub(mean) if scaled is x else scaled.sub_(mean)).mul_(factor)

    @cached_property
    def _factor(self) -> Tensor:
        return 1.0 / self.std
