"""Small seeded sketches of the clients' weights, for a map of the clients.

A count sketch s = S theta adds every weight, with a sign of its own, to one of WIDTH numbers. S is
drawn from a seed, E |S v|^2 = |v|^2, and distances between clients are kept to about
sqrt(2 / WIDTH) of their value. Memory is O(d) whatever N is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.seeding import derive

WIDTH = 64


class Sketch:
    """S [WIDTH, d], as a place and a sign for each of the d weights."""

    def __init__(self, num_params: int, seed: int, device: torch.device):
        generator = torch.Generator().manual_seed(derive(seed, "sketch", num_params))
        self.place = torch.randint(WIDTH, (num_params,), generator=generator).to(device)
        self.sign = (
            2 * torch.randint(2, (num_params,), generator=generator, dtype=torch.int8) - 1
        ).to(device)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return S theta_i for theta [C, d]: [C, WIDTH], in float64."""
        sketches = torch.zeros(len(theta), WIDTH, dtype=torch.float64, device=theta.device)
        for sketch, weights in zip(sketches, theta, strict=True):
            sketch.index_add_(0, self.place, weights.double() * self.sign)
        return sketches.cpu()
