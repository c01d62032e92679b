"""How inputs are scaled before a network sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Inputs are used as (x - mean) * (1 / std); mean and std broadcast against one example."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    std: Tensor = field(default_factory=lambda: torch.ones(()))

    @classmethod
    def fit(cls, x: np.ndarray) -> Scaling:
        """Mean and deviation of a pool: per feature for tables [n, f], per channel for images [n, c, h, w], else one of each."""
        axes = {2: (0,), 4: (0, 2, 3)}.get(x.ndim, tuple(range(x.ndim)))
        if (
            x.dtype == np.uint8 and x.ndim == 4
        ):  # count the 256 values instead of converting every pixel
            counts = np.zeros((x.shape[1], 256), dtype=np.int64)
            for part in np.array_split(
                x, len(x) // 4096 + 1
            ):  # which it makes eight times as large
                counts += [
                    np.bincount(part[:, c].ravel(), minlength=256) for c in range(x.shape[1])
                ]
            values = np.arange(256.0)
            mean = counts @ values / counts.sum(1)
            std = np.sqrt(counts @ values**2 / counts.sum(1) - mean**2)
        else:
            mean, std = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
        std = np.where(
            std > 1e-12, std, 1.0
        )  # a constant feature stays zero instead of dividing by zero
        shape = (-1, 1, 1) if x.ndim == 4 else mean.shape
        return cls(
            torch.tensor(mean, dtype=torch.float32).reshape(shape),
            torch.tensor(std, dtype=torch.float32).reshape(shape),
        )

    @property
    def is_identity(self) -> bool:
        """Whether the inputs are used as they are."""
        return self.mean.ndim == 0 and self.mean.item() == 0 and self.std.item() == 1

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The scaled inputs."""
        scaled = x.to(dtype)
        if self.is_identity:
            return scaled
        mean, factor = self.mean.to(dtype), self._factor.to(dtype)
        return (scaled.sub(mean) if scaled is x else scaled.sub_(mean)).mul_(
            factor
        )  # in place where it is a copy already

    @cached_property
    def _factor(self) -> Tensor:
        return 1.0 / self.std
