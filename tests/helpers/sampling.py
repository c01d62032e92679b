"""Draws and log-densities of normal-inverse-Wishart distributions, by numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedhb.distributions import Dof, NormalInverseWishart

STANDARD_ERRORS = 5.0


REJECTED = 1e-3


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_niws(d: int, dof: Dof = "full") -> tuple[NormalInverseWishart, NormalInverseWishart]:
    """Two NIWs that differ in every parameter; n0 is large enough for log-densities of finite
    variance.
    """
    m0, V0 = vector(0.3, -0.2, 0.5)[:d], vector(1.0, 2.0, 0.7)[:d]
    q = NormalInverseWishart(m0, V0, l0=4.0, n0=d + 9.0, dof=dof)
    p = NormalInverseWishart(
        torch.zeros(d, dtype=torch.float64), vector(1.3, 1.3, 1.3)[:d], l0=1.0, n0=d + 2.0, dof=dof
    )
    return q, p


def draw_niw(q: NormalInverseWishart, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws (mu [num, d], Sigma [num, d, d]) of a full NormalInverseWishart from its definition, with scipy alone."""
    random = np.random.default_rng(seed)
    d = q.m0.numel()
    Sigma = stats.invwishart.rvs(
        df=q.n0, scale=np.diag(q.V0.numpy()), size=num, random_state=random
    ).reshape(num, d, d)
    return gaussian_rows(random, np.broadcast_to(q.m0.numpy(), (num, d)), Sigma / q.l0), Sigma


def gaussian_rows(
    random: np.random.Generator, mean: np.ndarray, covariance: np.ndarray
) -> np.ndarray:
    """One draw of N(mean, covariance) for every row of mean [num, d] and covariance [num, d, d]."""
    return mean + np.einsum(
        "nij,nj->ni", np.linalg.cholesky(covariance), random.standard_normal(mean.shape)
    )


def log_gaussian(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """log N(x; mean, covariance) for every row."""
    residual = x - mean
    quadratic = np.einsum(
        "ni,ni->n", residual, np.linalg.solve(covariance, residual[..., None])[..., 0]
    )
    return -0.5 * (
        x.shape[1] * math.log(2 * math.pi) + np.linalg.slogdet(covariance)[1] + quadratic
    )


def log_niw(q: NormalInverseWishart, mu: np.ndarray, Sigma: np.ndarray) -> np.ndarray:
    """The log density of a full NormalInverseWishart by scipy, for every row."""
    inverse_wishart = stats.invwishart.logpdf(
        np.moveaxis(Sigma, 0, -1), df=q.n0, scale=np.diag(q.V0.numpy())
    )
    return log_gaussian(mu, q.m0.numpy(), Sigma / q.l0) + inverse_wishart


def assert_mean(draws: np.ndarray, expected: float, relative: float) -> None:
    """The mean of draws is `expected`; its standard error must resolve `relative` of it, or nothing
    is tested.
    """
    error = draws.std(ddof=1) / math.sqrt(len(draws))
    assert STANDARD_ERRORS * error < relative * abs(expected)
    assert abs(draws.mean() - expected) < STANDARD_ERRORS * error
