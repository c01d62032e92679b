"""Normal-Inverse-Wishart, Student-t and spiky mixtures: divergences, modes and samplers.

These are pure functions of flat vectors: the last axis is the vector, leading axes [...] are batch
axes. Sums over coordinates are taken and returned in float64, whatever the inputs. All randomness
comes from the generator that is passed in. Symbols, with the label of the paper's equation that
introduces them:

    theta [d]             the vector whose distribution is modelled              eq:niw_prior_theta
    mu [d], Sigma [d, d]  its mean and covariance: theta ~ N(mu, Sigma)          eq:niw_prior_theta
    m0, V0, l0, n0        (mu, Sigma) ~ N(mu; m0, Sigma / l0) IW(Sigma; V0, n0);
                          V0 is diagonal, [d]                                    eq:niw_q_phi
    nu, B                 degrees of freedom and scale matrix of the Student-t
                          t_nu(a, B); B is diagonal                              sec:niw
    m, p_do, eps          q(theta) = prod_l p_do N(m[l], eps^2 I)
                                            + (1 - p_do) N(0, eps^2 I)           eq:spiky2
    r [K, d], sigma2      p(theta) = (1/K) sum_j N(theta; r_j, sigma2 I)         eq:mix_prior

A column l of `eq:spiky2` is kept as a whole with probability p_do (p_do is not the probability of
dropping it). How the coordinates are grouped into columns matters to none of the quantities below,
so columns do not appear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedhb.errors import InputError

Dof = Literal["full", "per_coordinate"]


@dataclass(frozen=True, eq=False)
class StudentT:
    """The Student-t distribution t_nu(location, B) with diagonal scale matrix B.

    Attributes:
        nu: degrees of freedom, positive.
        location: [d].
        scale: the diagonal of B [d], on the scale of a variance: the covariance is
            nu / (nu - 2) B for nu > 2.
        joint: True for one d-dimensional t (all coordinates share a single chi-square:
            uncorrelated, not independent), False for the product of d one-dimensional ones.
    """

    nu: float
    location: Tensor
    scale: Tensor
    joint: bool

    def __post_init__(self) -> None:
        _require_vectors(location=self.location, scale=self.scale)
        if not self.nu > 0:
            raise InputError(
                f"nu is {self.nu}: the degrees of freedom of a Student-t must be positive"
            )

    def sample(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw theta = location + sqrt(B) z sqrt(nu / chi2_nu), z standard normal.

        Args:
            num: how many draws.
            generator: draws the numbers on its device; they are moved to that of `location`.

        Returns:
            Draws [num, d] with the dtype and device of `location`.
        """
        d = self.location.shape[0]
        # one chi-square per draw, or per coordinate
        chi2 = chi_square(self.nu, (num, 1 if self.joint else d), generator)
        dtype, device = self.location.dtype, generator.device
        z = torch.randn((num, d), generator=generator, device=device, dtype=dtype)
        stretched = z.mul_((self.nu / chi2).sqrt_().to(z.dtype)).to(self.location.device)
        return self.location + self.scale.sqrt() * stretched

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the log density at theta [..., d], in float64 [...].

            lgamma((nu+k)/2) - lgamma(nu/2) - k/2 log(nu pi) - 1/2 log|B|
                - (nu+k)/2 log(1 + delta/nu),      delta = (theta-a)^T B^-1 (theta-a)

        k = d for the joint distribution, k = 1 for each factor of the product.
        """
        d = self.location.shape[0]
        scale = self.scale.double()
        squares = (theta.double() - self.location.double()).square() / scale  # [..., d]
        if self.joint:
            k, factors, tails = d, 1, torch.log1p(squares.sum(-1) / self.nu)
        else:
            k, factors, tails = 1, d, torch.log1p(squares / self.nu).sum(-1)
        normaliser = (
            math.lgamma((self.nu + k) / 2)
            - math.lgamma(self.nu / 2)
            - k / 2 * math.log(self.nu * math.pi)
        )
        return factors * normaliser - scale.log().sum() / 2 - (self.nu + k) / 2 * tails


@dataclass(frozen=True, eq=False)
class NormalInverseWishart:
    """The Normal-Inverse-Wishart of (mu, Sigma) with a diagonal scale matrix, `eq:niw_q_phi`.

    Attributes:
        m0: location of mu [d].
        V0: diagonal of the scale matrix [d], positive.
        l0: mu given Sigma has covariance Sigma / l0; positive.
        n0: degrees of freedom of the Inverse-Wishart, more than `dim` - 1.
        dof: "full" is one d-dimensional NIW; its Sigma is a full matrix although V0 is diagonal.
            "per_coordinate" is d independent one-dimensional NIWs (the conjugate family of a
            diagonal Sigma): d becomes 1 in every constant, and n0 counts from dimension 1.
    """

    m0: Tensor
    V0: Tensor
    l0: float
    n0: float
    dof: Dof = "full"

    def __post_init__(self) -> None:
        _require_vectors(m0=self.m0, V0=self.V0)
        if self.dof not in ("full", "per_coordinate"):
            raise InputError(f'dof is {self.dof!r}: it must be "full" or "per_coordinate"')
        if not self.l0 > 0:
            raise InputError(f"l0 is {self.l0}: it must be positive")
        if not self.n0 > self.dim - 1:
            raise InputError(
                f"n0 is {self.n0}: an Inverse-Wishart of dimension {self.dim} needs "
                f"n0 > {self.dim - 1}"
            )

    @property
    def dim(self) -> int:
        """Return the dimension in the constants: d for "full", 1 for "per_coordinate"."""
        return self.m0.shape[0] if self.dof == "full" else 1

    @property
    def copies(self) -> int:
        """Return the number of independent NIWs: 1 for "full", d for "per_coordinate"."""
        return self.m0.shape[0] // self.dim

    def mode(self) -> tuple[Tensor, Tensor]:
        """Return mu* [d] and the diagonal of Sigma* [d], which stand for it, `appeq:niw_phi*`.

        mu* = m0 and Sigma* = V0 / (n0 + dim + 1). This is the paper's expression: the mode of the
        marginal IW(V0, n0). The mode of the joint density of (mu, Sigma) divides by n0 + dim + 2
        instead, because N(mu; m0, Sigma / l0) contributes another |Sigma|^(-1/2).
        """
        return self.m0, self.V0 / (self.n0 + self.dim + 1)

    def mean_precision(self) -> Tensor:
        """Return the diagonal [d] of E[Sigma^-1] = n0 / V0, `app_eq:fact_2`.

        The rest of the matrix is zero.
        """
        return self.n0 / self.V0

    def mean_log_det(self) -> Tensor:
        """Return E log|Sigma| in float64, `app_eq:fact_1`.

        It is -d log 2 + log|V0| - sum_i digamma((n0 - i + 1)/2).
        """
        d, log_det = self.m0.shape[0], self.V0.double().log().sum()
        return log_det - d * math.log(2) - self.copies * _sum_digamma(self.n0, self.dim)

    def predictive(self) -> StudentT:
        """Return the marginal of theta ~ N(mu, Sigma), `sec:niw`.

        It is t_nu(m0, (l0 + 1) V0 / (l0 nu)) with nu = n0 - dim + 1.
        """
        nu = self.n0 - self.dim + 1
        scale = self.V0 * ((self.l0 + 1) / (self.l0 * nu))
        return StudentT(nu, self.m0, scale, joint=self.dof == "full")


def niw_kl(q: NormalInverseWishart, p: NormalInverseWishart) -> Tensor:
    """Return KL(q || p) of two NIWs of the same kind, with all constants; `app_eq:niw_server_kl`.

    With q = {m0, V0, l0, n0}, p = {mu0, Sigma0, lambda0, nu0} and rho = Sigma0 / V0,

        KL = 1/2 sum_k [n0 (rho_k - 1) - nu0 log rho_k + lambda0 n0 (mu0 - m0)_k^2 / V0_k]
           + d/2 [lambda0/l0 - 1 - log(lambda0/l0)]
           + copies * sum_{i=1..dim} [(a_i - b_i) digamma(a_i) + lgamma(b_i) - lgamma(a_i)]

    with a_i = (n0 - i + 1)/2, b_i = (nu0 - i + 1)/2. Terms that cancel are paired before they are
    summed: for n0 near d in the millions the log-gamma functions alone sum to 1e13.

    Returns:
        A float64 scalar, differentiable in m0, V0 of both.
    """
    if q.dof != p.dof or q.m0.shape != p.m0.shape:
        sides = f"{q.dof} [{q.m0.numel()}] and {p.dof} [{p.m0.numel()}]"
        raise InputError(f"a divergence needs two NIWs with the same dof and size, not {sides}")
    d = q.m0.shape[0]
    ratio = p.V0 / q.V0
    scatter = (p.m0 - q.m0).square() / q.V0
    # the first two nearly cancel
    sums = [term.double().sum() for term in (ratio - 1, ratio.log(), scatter)]
    coordinates = (q.n0 * sums[0] - p.n0 * sums[1] + p.l0 * q.n0 * sums[2]) / 2
    scalars = d / 2 * (p.l0 / q.l0 - 1 - math.log(p.l0 / q.l0))
    return coordinates + scalars + q.copies * _sum_gamma_divergence(q.n0, p.n0, q.dim)


def expected_log_gaussian(
    q: NormalInverseWishart, mean: Tensor, variance: Tensor | float
) -> Tensor:
    """Return E[log N(theta; mu, Sigma)], with all constants; `app_eq:niw_elog_2`.

        -1/2 {d log 2 pi + E log|Sigma| + n0 sum_k [(mean_k - m0_k)^2 + variance_k] / V0_k + d / l0}

    The expectation is over (mu, Sigma) ~ q and an independent theta. Only the first two moments of
    each coordinate of theta matter, since E[Sigma^-1] is diagonal.

    Args:
        q: the distribution of (mu, Sigma).
        mean, variance: E[theta_k] and Var[theta_k] of every coordinate, [..., d]; the variance may
            be a number.

    Returns:
        float64 [...].
    """
    d = q.m0.shape[0]
    spread = ((mean.double() - q.m0.double()).square() + variance) / q.V0.double()
    return -(d * math.log(2 * math.pi) + q.mean_log_det() + q.n0 * spread.sum(-1) + d / q.l0) / 2


def gaussian_kl(
    mean: Tensor, variance: Tensor | float, prior_mean: Tensor, prior_variance: Tensor
) -> Tensor:
    """Return KL(N(mean, variance) || N(prior_mean, prior_variance)) of diagonal Gaussians.

        1/2 sum_k [(variance + (mean - prior_mean)^2) / prior_variance
                   - 1 - log(variance / prior_variance)]_k

    Args:
        mean, variance: [..., d]; the variance may be a number.
        prior_mean, prior_variance: [d].

    Returns:
        float64 [...].
    """
    prior_variance = prior_variance.double()
    ratio = variance / prior_variance
    distance = (mean.double() - prior_mean.double()).square() / prior_variance
    return (distance + ratio - 1 - ratio.log()).sum(-1) / 2


def spiky_moments(m: Tensor, p_do: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance of every coordinate of a spiky mixture, `eq:spiky2`.

    They are p_do m and p_do (1 - p_do) m^2 + eps^2. The second moment is p_do m^2 + eps^2; in this
    form of the variance nothing cancels when p_do is near 1. Both have the shape and dtype of m.
    """
    return p_do * m, p_do * (1 - p_do) * m.square() + eps**2


def spiky_kl(
    m: Tensor, p_do: float, eps: float, prior_mean: Tensor, prior_variance: Tensor
) -> Tensor:
    """Return the KL of a spiky mixture to a diagonal Gaussian, with all constants.

    It is approximated as in `app_eq:niw_client_detail_4`:
    p_do KL(N(m, eps^2) || prior) + (1 - p_do) KL(N(0, eps^2) || prior). KL is convex, so this is an
    upper bound. It is too large by the entropy of a Bernoulli(p_do) variable for each column whose
    two spikes do not overlap, by less for the others. In m it is
    p_do (m - prior_mean)^2 / (2 prior_variance) plus a constant, `app_eq:niw_client_detail_7`.

    Args:
        m, p_do, eps: the mixture, m [..., d].
        prior_mean, prior_variance: the Gaussian, [d] each.

    Returns:
        float64 [...].
    """
    kept = gaussian_kl(m, eps**2, prior_mean, prior_variance)
    dropped = gaussian_kl(torch.zeros_like(prior_mean), eps**2, prior_mean, prior_variance)
    return p_do * kept + (1 - p_do) * dropped


def log_mixture(m: Tensor, r: Tensor, sigma2: float) -> Tensor:
    """Return the exponents -||m - r_j||^2 / (2 sigma2) of `eq:mix_client_opt2`.

    Differences are taken first, and their squares added up in float64. To expand the square in
    float32 would leave an error near 1e-7 ||m||^2, which for millions of coordinates is not small
    beside ||m - r_j||^2.

    Args:
        m: [..., d].
        r, sigma2: means [K, d] and common variance of the components.

    Returns:
        float64 [..., K].
    """
    squares = torch.zeros((*m.shape[:-1], len(r)), dtype=torch.float64, device=m.device)
    for start in range(0, m.shape[-1], 8192):  # in blocks that stay in the cache
        part = slice(start, start + 8192)
        gaps = [(m[..., part] - r_j[part]).square().sum(-1) for r_j in r]
        squares = squares + torch.stack(gaps, dim=-1).double()
    if not torch.isfinite(squares).all():  # float32 squares overflow beyond 1e19
        squares = torch.stack([(m.double() - r_j.double()).square().sum(-1) for r_j in r], dim=-1)
    return squares / (-2 * sigma2)


def responsibilities(m: Tensor, r: Tensor, sigma2: float) -> Tensor:
    """Return c(j | m) = softmax_j(-||m - r_j||^2 / (2 sigma2)), float64 [..., K].

    This is the E-step after `eq:mix_server`.
    """
    return torch.softmax(log_mixture(m, r, sigma2), dim=-1)


def mixture_penalty(m: Tensor, r: Tensor, sigma2: float) -> Tensor:
    """Return -log sum_j exp(-||m - r_j||^2 / (2 sigma2)), float64 [...].

    This is the second term of `eq:mix_client_opt2`.
    """
    return -torch.logsumexp(log_mixture(m, r, sigma2), dim=-1)


def total(x: Tensor) -> Tensor:
    """Return the sum over the last axis in float64 [...].

    Groups of 4096 are summed in x's own type, which is vectorised, and then these sums.
    """
    whole = x.shape[-1] // 4096 * 4096
    groups = x[..., :whole].unflatten(-1, (-1, 4096)).sum(-1).double().sum(-1)
    return groups + x[..., whole:].sum(-1).double()


def chi_square(nu: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a chi-square variable with nu > 0 degrees of freedom, exactly, in float64."""
    concentration = torch.full(shape, nu / 2, dtype=torch.float64, device=generator.device)
    # torch.distributions.Gamma takes no generator
    return 2 * torch._standard_gamma(concentration, generator=generator)


@lru_cache(maxsize=16)
def _sum_digamma(n: float, dim: int) -> float:
    """Return sum_{i=1..dim} digamma((n - i + 1) / 2)."""
    return torch.special.digamma(_halves(n, dim)).sum().item()


@lru_cache(maxsize=16)
def _sum_gamma_divergence(n: float, nu: float, dim: int) -> float:
    """Return sum_{i=1..dim} [(a_i - b_i) digamma(a_i) + lgamma(b_i) - lgamma(a_i)].

    a_i = (n-i+1)/2, b_i = (nu-i+1)/2.
    """
    a, b = _halves(n, dim), _halves(nu, dim)
    terms = (n - nu) / 2 * torch.special.digamma(a) - (torch.lgamma(a) - torch.lgamma(b))
    return terms.sum().item()


def _halves(n: float, dim: int) -> Tensor:
    """Return (n - i + 1) / 2 for i = 1..dim, in float64 [dim]."""
    return (n - torch.arange(dim, dtype=torch.float64)) / 2


def _require_vectors(**vectors: Tensor) -> None:
    """Check that all tensors are vectors of one length, at least 1."""
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    if len(set(shapes.values())) != 1 or any(
        len(shape) != 1 or shape[0] == 0 for shape in shapes.values()
    ):
        raise InputError(f"shapes {shapes}: give vectors of one length, at least 1")
