"""Squared Hellinger distances between regressions with known noise, and bounds on them.

    d^2(P_theta, P^i) = E_x [ 1 - exp( -|f_theta(x) - f^i(x)|^2 / (8 sigma^2) ) ]

Theorem 2 (thm:generalisation) bounds 1/N sum_i E_{q_i} d^2 by
O(1/n) + C eps_n^2 + C' (r_n + 1/N sum_i lambda_i) with constants that it leaves open.
`certificate` is a bound without any, from the same proof with half of the log-likelihood ratio
l_n = log P_theta(D_i) / P^i(D_i) (docs/theory.md): E_D exp(l_n / 2) = (1 - d^2)^n, so that for all
q at once, with probability 1 - zeta,

    n sum_i E_{q_i} d^2 <= -1/2 sum_i E_{q_i} l_n
                           + KL(q(phi) prod_i q_i || p(phi) prod_i p(theta_i | phi))
                           + log(1 / zeta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


def squared_hellinger(f: Array, g: Array, noise: float) -> Array:
    """Return 1 - integral sqrt(N(y; f, noise^2) N(y; g, noise^2)) dy, element by element."""
    return -np.expm1(-((f - g) ** 2) / (8 * noise**2))


def log_ratio(y: Array, f: Array, truth: Array, noise: float) -> Array:
    """Return l_n: log N(y; f, noise^2) - log N(y; truth, noise^2), summed over the last axis."""
    return ((y - truth) ** 2 - (y - f) ** 2).sum(-1) / (2 * noise**2)


def certificate(n: int, count: int, half_ratio: float, kl: float, zeta: float) -> float:
    """Return the bound on 1/N sum_i E_{q_i} d^2.

    Args:
        n: examples per client.
        count: the number of clients, N.
        half_ratio: sum_i E_{q_i}[-l_n] / 2.
        kl: the KL of all of q to the prior.
        zeta: the probability that the bound does not hold.
    """
    return (half_ratio + kl - math.log(zeta)) / (n * count)


@dataclass(frozen=True)
class Backbone:
    """An MLP as the theorem sees it: L hidden layers of width M, S_x inputs, G weights in all."""

    layers: int
    width: int
    inputs: int
    weights: int

    def r_n(self, n: float) -> float:
        """Return r_n = G (L + 1) / n log M + G / n log(S_x sqrt(n / G))."""
        G = self.weights
        return G * (self.layers + 1) / n * math.log(self.width) + G / n * math.log(
            self.inputs * math.sqrt(n / G)
        )

    def eps_n2(self, n: float, delta: float = 1.0) -> float:
        """Return eps_n^2 = r_n log^(2 delta) n.

        delta = 1 is below every value that the theorem allows.
        """
        return self.r_n(n) * math.log(n) ** (2 * delta)

    def reference_variance(self, n: float, bound: float) -> float:
        """Return sigma_n^2 = G A / (8 n) of the proof's Gaussian (eq:q_tilde).

        It is around the best weights, |theta| <= bound.
        """
        w = bound * self.width
        bracket = (
            (self.inputs + 1 + 1 / (w - 1)) ** 2 + 1 / ((2 * w) ** 2 - 1) + 2 / (2 * w - 1) ** 2
        )
        inverse = (
            math.log(3 * self.inputs * self.width) * (2 * w) ** (2 * (self.layers + 1)) * bracket
        )
        return self.weights / (8 * n * inverse)

    def reference_kl(self, n: float, bound: float, deviation: float) -> float:
        """Return KL(N(theta, sigma_n^2 I) || N(mu, deviation^2 I)), |theta_k - mu_k| = deviation.

        It grows by G/2 log 2 as n doubles.
        """
        ratio = self.reference_variance(n, bound) / deviation**2
        return self.weights / 2 * (ratio - math.log(ratio))
