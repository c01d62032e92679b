"""Small pictures to corrupt."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from fedhb.data import corruptions


def constant(value, count=1):
    return np.full((count, 32, 32, 3), value, dtype=np.uint8)


def textured(count=4):
    """Smooth pictures with every brightness, and colour."""
    rng = np.random.default_rng(1)
    raw = ndimage.gaussian_filter(rng.normal(size=(count, 32, 32, 3)), (0, 2, 2, 0), mode="wrap")
    raw = (raw - raw.min()) / (raw.max() - raw.min())
    return (raw * 255).astype(np.uint8)


def spy_on(monkeypatch, name):
    """The arguments of every call of a function of the module."""
    calls, real = [], getattr(corruptions, name)

    def spied(*arguments, **options):
        calls.append((*arguments, *options.values()))
        return real(*arguments, **options)

    monkeypatch.setattr(corruptions, name, spied)
    return calls
