"""NIW's sums under differential privacy (privacy.py): the differences d of a client are clipped before their squares are taken.

With |d| <= C the squares have |d^2| <= |d|^2 <= C^2, so that the contribution (d, d^2) is no longer than sqrt(C^2 + C^4). Scaling
d alone keeps both sums those of one client; scaling (d, d^2) would call it more scattered than it is. Noise may make a sum of
squares negative: `aggregate` takes it as zero, and V0 stays above the prior's own share of it.

With dof="per_layer" the scatter and the curvature that the variance is learned from are withheld, and the prior stays where it
began: a hundredth of the noise on their few numbers would decide it.
"""

from __future__ import annotations

import math

import torch

from fedhb.algorithms.contract import Arrays

REFERENCES = {"m": "m0", "head": "head", "buffers": "buffers"}


class Bounded:
    """What `privacy.Private` asks of NIW."""

    dof: str

    @property
    def withheld(self) -> tuple[str, ...]:
        """Sums that are not released."""
        return ("squares", "head_squares", "curvature") if self.dof == "per_layer" else ()

    def contribution_bound(self, clip: float) -> float:
        """The length of (d, d^2), or of d where no squares are released."""
        return clip if self.dof == "per_layer" else math.sqrt(clip**2 + clip**4)

    def shorten(self, received: Arrays, found: Arrays, clip: float) -> Arrays:
        """What a client [1, ...] found, with all its differences together no longer than C."""
        gaps = {
            key: found[key] - received[ref]
            for key, ref in REFERENCES.items()
            if key in found and ref in received
        }
        length = float(
            torch.stack([gap.double().square().sum() for gap in gaps.values()]).sum().sqrt()
        )
        scale = min(1.0, clip / length) if length > 0 else 1.0
        return found | {key: received[REFERENCES[key]] + scale * gap for key, gap in gaps.items()}
