"""Predictions and spiky mixtures of distributions.py against simulation and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling import (
    REJECTED,
    STANDARD_ERRORS,
    assert_mean,
    draw_niw,
    gaussian_rows,
    generator,
    two_niws,
    vector,
)
from scipy import integrate, stats

from fedhb.distributions import (
    NormalInverseWishart,
    StudentT,
    chi_square,
    gaussian_kl,
    spiky_kl,
    spiky_moments,
)


# --- Student-t
def predictive_at(nu: float, d: int = 3) -> tuple[NormalInverseWishart, StudentT]:
    """A full NormalInverseWishart whose predictive has nu degrees of freedom."""
    q = NormalInverseWishart(
        vector(0.5, -1.0, 2.0)[:d], vector(1.0, 2.0, 5.0)[:d], l0=4.0, n0=nu + d - 1
    )
    return q, q.predictive()


def draw_hierarchy(q: NormalInverseWishart, num: int, seed: int) -> np.ndarray:
    """theta [num, d] from (mu, Sigma) ~ NormalInverseWishart, theta ~ N(mu, Sigma), without the Student-t."""
    mu, Sigma = draw_niw(q, num, seed)
    return gaussian_rows(np.random.default_rng(seed + 1), mu, Sigma)


def fit_of_mahalanobis(t: StudentT, theta: np.ndarray) -> float:
    """p-value of the fact that (theta - a)^T B^-1 (theta - a) / d of a joint t follows F(d, nu)."""
    d = t.location.numel()
    mahalanobis = ((theta - t.location.numpy()) ** 2 / t.scale.numpy()).sum(1)
    return float(stats.kstest(mahalanobis / d, stats.f(d, t.nu).cdf).pvalue)


def test_predictive_covariance_is_that_of_the_hierarchy() -> None:
    # nu = 12 rather than 5: the standard error of a variance needs fourth moments, and its own
    # accuracy eighth ones.
    q, t = predictive_at(12)
    draws = {
        "hierarchy": draw_hierarchy(q, 100_000, seed=5),
        "sampler": t.sample(100_000, generator(6)).numpy(),
    }
    expected = np.diag(t.nu / (t.nu - 2) * t.scale.numpy())
    for theta in draws.values():
        centred = theta - t.location.numpy()
        products = np.einsum("ni,nj->nij", centred, centred)
        error = products.std(0) / math.sqrt(len(theta))
        # 5 standard errors are 3 percent; B without (l0 + 1) / l0 is 20 percent off, without nu /
        # (nu - 2) 17 percent.
        assert (
            5 * error < 0.04 * np.sqrt(np.outer(expected.diagonal(), expected.diagonal()))
        ).all()
        assert (np.abs(products.mean(0) - expected) < STANDARD_ERRORS * error).all()
        np.testing.assert_array_less(
            np.abs(centred.mean(0)), STANDARD_ERRORS * centred.std(0) / math.sqrt(len(theta))
        )


def test_predictive_is_jointly_student_t() -> None:
    q, t = predictive_at(5)
    assert fit_of_mahalanobis(t, draw_hierarchy(q, 20_000, seed=7)) > REJECTED
    assert fit_of_mahalanobis(t, t.sample(20_000, generator(8)).numpy()) > REJECTED


def test_one_chi_square_per_coordinate_would_be_noticed() -> None:
    # The common bug: right marginals and covariance, wrong joint distribution. The test above must
    # reject it.
    _, t = predictive_at(5)
    bug = StudentT(t.nu, t.location, t.scale, joint=False)
    assert fit_of_mahalanobis(t, bug.sample(20_000, generator(8)).numpy()) < REJECTED


def test_one_chi_square_for_all_draws_would_be_noticed() -> None:
    _, t = predictive_at(5)
    z = torch.randn(20_000, 3, generator=generator(9), dtype=torch.float64)
    bug = t.location + t.scale.sqrt() * z * (t.nu / chi_square(t.nu, (1, 1), generator(10))).sqrt()
    assert fit_of_mahalanobis(t, bug.numpy()) < REJECTED


def test_per_coordinate_predictive_is_a_product_of_univariate_ts() -> None:
    q = NormalInverseWishart(
        vector(0.5, -1.0), vector(1.0, 5.0), l0=4.0, n0=5.0, dof="per_coordinate"
    )
    t = q.predictive()
    assert t.nu == 5.0 and not t.joint
    theta = t.sample(20_000, generator(11)).numpy()
    for k in range(2):
        marginal = stats.t(t.nu, t.location[k].item(), math.sqrt(t.scale[k].item())).cdf
        coordinate = NormalInverseWishart(q.m0[k : k + 1], q.V0[k : k + 1], q.l0, q.n0)
        direct = draw_hierarchy(coordinate, 20_000, seed=12 + k)[:, 0]
        assert stats.kstest(theta[:, k], marginal).pvalue > REJECTED
        assert stats.kstest(direct, marginal).pvalue > REJECTED
    # Independent coordinates: the sizes |theta_k - a_k| are uncorrelated in rank. A shared
    # chi-square correlates them.
    sizes = np.abs(theta - t.location.numpy())
    assert stats.spearmanr(sizes[:, 0], sizes[:, 1]).pvalue > REJECTED
    shared = np.abs(
        (
            StudentT(t.nu, t.location, t.scale, joint=True).sample(20_000, generator(11))
            - t.location
        ).numpy()
    )
    assert stats.spearmanr(shared[:, 0], shared[:, 1]).pvalue < REJECTED


@pytest.mark.parametrize("nu", [0.7, 5.0, 50_003.0, 1e7])
def test_chi_square_is_exact(nu: float) -> None:
    draws = chi_square(nu, (20_000,), generator(14)).numpy()
    assert stats.kstest(draws, stats.chi2(nu).cdf).pvalue > REJECTED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_are_reproducible_and_leave_the_global_generator_alone(dtype: torch.dtype) -> None:
    _, t = predictive_at(5)
    t = StudentT(t.nu, t.location.to(dtype), t.scale.to(dtype), joint=True)
    state = torch.random.get_rng_state()
    first, second = t.sample(4, generator(15)), t.sample(4, generator(15))
    assert first.dtype == dtype and first.shape == (4, 3) and torch.equal(first, second)
    assert not torch.equal(first, t.sample(4, generator(16)))
    assert torch.equal(state, torch.random.get_rng_state())


def test_student_log_density_is_that_of_scipy() -> None:
    _, t = predictive_at(5)
    theta = t.sample(50, generator(17)).reshape(5, 10, 3)
    joint = stats.multivariate_t(t.location.numpy(), np.diag(t.scale.numpy()), df=t.nu).logpdf(
        theta.numpy()
    )
    np.testing.assert_allclose(
        t.log_prob(theta).numpy(), joint, rtol=1e-12
    )  # a dozen float64 operations on each side
    product = (
        stats.t(t.nu, t.location.numpy(), np.sqrt(t.scale.numpy())).logpdf(theta.numpy()).sum(-1)
    )
    factors = StudentT(t.nu, t.location, t.scale, joint=False)
    np.testing.assert_allclose(factors.log_prob(theta).numpy(), product, rtol=1e-12)


def test_spiky_moments_by_simulation() -> None:
    m, p_do, eps, num = vector(1.0, -2.0, 0.0), 0.7, 0.1, 200_000
    random = np.random.default_rng(18)
    theta = (random.random((num, 1)) < p_do) * m.numpy() + eps * random.standard_normal((num, 3))
    mean, variance = (moment.numpy() for moment in spiky_moments(m, p_do, eps))
    # 5 standard errors of a mean are 1 percent of its coordinate's spread: p_do and 1 - p_do cannot
    # be swapped unseen.
    for k in range(3):
        standard_error = theta[:, k].std() / math.sqrt(num)
        assert abs(theta[:, k].mean() - mean[k]) < STANDARD_ERRORS * standard_error
        squares = (theta[:, k] - mean[k]) ** 2
        assert_mean(squares, variance[k], relative=0.02)
    np.testing.assert_allclose(
        variance + mean**2, p_do * m.numpy() ** 2 + eps**2, rtol=1e-14
    )  # the second moment


def test_spiky_moments_in_the_expected_log_density_are_the_rho_of_the_paper() -> None:
    # app_eq:niw_elog_4: E(theta - m0)^2 = rho + eps^2, rho = p (m - m0)^2 + (1 - p) m0^2, nowhere
    # negative.
    random = generator(19)
    m, m0 = (torch.randn(1000, generator=random, dtype=torch.float64) for _ in range(2))
    for p_do in (0.0, 0.3, 0.999, 1.0):
        mean, variance = spiky_moments(m, p_do, 1e-4)
        rho = p_do * (m - m0) ** 2 + (1 - p_do) * m0**2
        torch.testing.assert_close((mean - m0) ** 2 + variance, rho + 1e-8, rtol=1e-12, atol=1e-15)
        assert (variance > 0).all()


def test_spiky_kl_is_the_divergence_plus_the_entropy_of_the_mask() -> None:
    # Quadrature in one dimension: two spikes 40 widths apart do not overlap, so the bound is off by
    # all the entropy.
    m, p_do, eps, prior_mean, prior_variance = 2.0, 0.8, 0.05, 0.5, 0.6
    spikes = [stats.norm(m, eps), stats.norm(0.0, eps)]
    prior = stats.norm(prior_mean, math.sqrt(prior_variance))

    def integrand(x: float) -> float:
        density = p_do * spikes[0].pdf(x) + (1 - p_do) * spikes[1].pdf(x)
        return density * (math.log(density) - prior.logpdf(x)) if density > 0 else 0.0

    exact = sum(
        integrate.quad(integrand, c - 10 * eps, c + 10 * eps, epsabs=1e-10)[0] for c in (m, 0.0)
    )
    entropy = -(p_do * math.log(p_do) + (1 - p_do) * math.log(1 - p_do))
    bound = spiky_kl(vector(m), p_do, eps, vector(prior_mean), vector(prior_variance)).item()
    assert bound == pytest.approx(
        exact + entropy, abs=1e-8
    )  # the quadrature's error; the entropy is 0.5


def test_spiky_kl_pulls_like_the_penalty_of_the_paper() -> None:
    # app_eq:niw_client_detail_7, the prior at the mode: p_do / 2 (n0 + d + 1) (m - m0)^T V0^-1 (m -
    # m0) + constant.
    q, _ = two_niws(3)
    p_do, eps = 0.9, 1e-4
    m = torch.randn(2, 3, generator=generator(20), dtype=torch.float64)
    kl = spiky_kl(m, p_do, eps, *q.mode())
    penalty = p_do / 2 * (q.n0 + 3 + 1) * ((m - q.m0) ** 2 / q.V0).sum(-1)
    assert kl.shape == (2,)
    assert (kl[0] - kl[1]).item() == pytest.approx(
        (penalty[0] - penalty[1]).item(), rel=1e-12
    )  # constants cancel
    certain = spiky_kl(m, 1.0, eps, *q.mode())
    torch.testing.assert_close(certain, gaussian_kl(m, eps**2, *q.mode()), rtol=0, atol=0)
