"""Sums as integers: what a client contributes, in fixed point, so that sums modulo 2^bits are sums of numbers.

Protocols for secure sums add integers modulo 2^b. A number v with |v| <= 2^r is encoded as q = round(v 2^f), and n clients' sum
is decoded as S / 2^f for the integer S in [-2^(b-1), 2^(b-1)) that their sum is congruent to. With

    f = b - 2 - r - ceil(log2 n)

nothing wraps around: |sum q| <= n (2^(r+f) + 1/2) < 2^(b-1), so S is the sum of the q. Each rounding is off by at most 2^-(f+1),
and turning S into a float64 by at most 2^-53 |S|. So, for every number of the sum,

    |decoded - true| <= n 2^-(f+1) + 2^-53 (|true| + n 2^-(f+1)).

A number beyond the range is an error, never clipped: a wrong sum that nobody notices is worse than a client that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fedhb.algorithms.base import Arrays
from fedhb.errors import InputError

RANGE = 24
"""r: contributions lie within 2^24, which has room for sums over millions of examples' losses."""
LEAST = 24
"""Bits after the point: squares of weights' differences, 1e-6 and smaller, must not be rounded away."""


@dataclass(frozen=True)
class Encoding:
    """Between the sums of one client, or of a cohort, and a vector of integers modulo 2^bits.

    Attributes:
        shapes: of each sum, which all clients and the server know.
        clients: how many may be added.
        bits: b, at most 64.
    """

    shapes: Mapping[str, tuple[int, ...]]
    clients: int
    bits: int = 64

    def __post_init__(self) -> None:
        if not 8 <= self.bits <= 64 or self.fraction < LEAST:
            raise InputError(
                f"a modulus of 2^{self.bits} has no room for sums of {self.clients} clients within 2^{RANGE}: "
                "use a protocol with a larger one (64 bits), or smaller cohorts"
            )

    @property
    def fraction(self) -> int:
        """f, the bits after the point."""
        return self.bits - 2 - RANGE - math.ceil(math.log2(max(self.clients, 1)))

    @property
    def length(self) -> int:
        """Integers in a vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def error(self, size: float = 0.0) -> float:
        """How far a decoded sum of this size may be from the true one."""
        rounding = self.clients * 2.0 ** -(self.fraction + 1)
        return rounding + 2.0**-53 * (size + rounding)

    def encode(self, sums: Arrays) -> np.ndarray:
        """One client's contribution: uint64 [length], each below 2^bits."""
        if {key: tuple(value.shape) for key, value in sums.items()} != dict(self.shapes):
            raise ValueError("the sums have other shapes than agreed")
        flat = torch.cat([sums[key].detach().double().cpu().reshape(-1) for key in sorted(self.shapes)]).numpy()
        if not (np.abs(flat) <= 2.0**RANGE).all():
            raise ValueError(f"a sum of {np.abs(flat).max():.3g} is beyond the range 2^{RANGE} of secure sums")
        whole = np.rint(np.ldexp(flat, self.fraction)).astype(np.int64).view(np.uint64)
        return whole & self._mask

    def decode(self, total: np.ndarray) -> Arrays:
        """The sums of a cohort from the sum of its vectors modulo 2^bits."""
        if total.shape != (self.length,) or total.dtype != np.uint64:
            raise ValueError(f"a sum of {total.dtype} {total.shape} instead of uint64 ({self.length},)")
        shift = np.uint64(64 - self.bits)
        signed = (total << shift).view(np.int64) >> np.int64(64 - self.bits)  # the sign bit is bit b-1
        flat, found, start = torch.from_numpy(np.ldexp(signed.astype(np.float64), -self.fraction)), {}, 0
        for key in sorted(self.shapes):
            size = math.prod(self.shapes[key])
            found[key] = flat[start : start + size].reshape(self.shapes[key])
            start += size
        return found

    @property
    def _mask(self) -> np.uint64:
        return np.uint64(2**self.bits - 1)
