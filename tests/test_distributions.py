"""The closed forms of distributions.py against simulation, quadrature, optimisers and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling import (
    assert_mean,
    draw_niw,
    gaussian_rows,
    generator,
    log_gaussian,
    log_niw,
    two_niws,
    vector,
)
from scipy import optimize, special, stats

from fedhb.distributions import (
    Dof,
    NormalInverseWishart,
    StudentT,
    expected_log_gaussian,
    gaussian_kl,
    log_mixture,
    mixture_penalty,
    niw_kl,
    responsibilities,
)


# --- Normal-Inverse-Wishart
@pytest.mark.parametrize("d", [1, 2, 3])
def test_niw_kl_is_the_mean_log_ratio(d: int) -> None:
    q, p = two_niws(d)
    mu, Sigma = draw_niw(q, 20_000, seed=d)
    # The least term of the divergence, the one in l0, is 8 percent of it or more.
    assert_mean(log_niw(q, mu, Sigma) - log_niw(p, mu, Sigma), niw_kl(q, p).item(), relative=0.03)


@pytest.mark.parametrize("dof", ["full", "per_coordinate"])
def test_niw_kl_of_equals_is_exactly_zero(dof: Dof) -> None:
    q, _ = two_niws(3, dof)
    assert niw_kl(q, q).item() == 0.0  # every pair of terms cancels before it is summed
    large = torch.ones(300_000)
    q = NormalInverseWishart(large, large, l0=1e5, n0=large.numel() + 1e5, dof=dof)
    assert niw_kl(q, q).item() == 0.0


def test_per_coordinate_is_a_sum_of_one_dimensional_niws() -> None:
    q, p = two_niws(3, "per_coordinate")
    theta, variance = vector(0.1, 0.9, -1.0), vector(0.2, 0.1, 0.4)
    kl, elog, log_density = 0.0, 0.0, 0.0
    for k in range(3):
        q_k, p_k = (
            NormalInverseWishart(s.m0[k : k + 1], s.V0[k : k + 1], s.l0, s.n0, "full")
            for s in (q, p)
        )
        kl += niw_kl(q_k, p_k).item()
        elog += expected_log_gaussian(q_k, theta[k : k + 1], variance[k : k + 1]).item()
        log_density += q_k.predictive().log_prob(theta[k : k + 1]).item()
        assert torch.equal(q.mode()[1][k : k + 1], q_k.mode()[1])
        assert torch.equal(q.predictive().scale[k : k + 1], q_k.predictive().scale)
    # The same numbers in another order of summation: a few units in the last of 53 bits.
    assert niw_kl(q, p).item() == pytest.approx(kl, rel=1e-14)
    assert expected_log_gaussian(q, theta, variance).item() == pytest.approx(elog, rel=1e-14)
    assert q.predictive().log_prob(theta).item() == pytest.approx(log_density, rel=1e-14)


def test_niw_kl_with_millions_of_dimensions() -> None:
    # The size of a MobileNet: n0 near d, where the log-gamma functions sum to 3e13 and the terms in
    # them to 3e9.
    d, examples = 3_206_976, 50_000
    ones = torch.ones(d, dtype=torch.float64)
    q = NormalInverseWishart(0.02 * ones, 1.0156 * ones, l0=examples + 1.0, n0=examples + d + 2.0)
    p = NormalInverseWishart(0.0 * ones, ones, l0=1.0, n0=d + 2.0)
    a, b = ((n - np.arange(d)) / 2 for n in (q.n0, p.n0))
    gammas = (a - b) * special.digamma(a) + special.gammaln(b) - special.gammaln(a)
    rho, drift = 1 / 1.0156, 0.02
    per_coordinate = q.n0 * (rho - 1) - p.n0 * math.log(rho) + q.n0 * drift**2 * rho
    shrinkage = 1 / q.l0 - 1 + math.log(q.l0)
    expected = math.fsum(gammas.tolist()) + d / 2 * (per_coordinate + shrinkage)
    # Each log-gamma, up to 2e7, is good to 4e-9: 1e-2 in the sum of 3e6 at worst, against a sum of
    # 4e9.
    assert niw_kl(q, p).item() == pytest.approx(expected, rel=1e-10)
    # float32 vectors: every ratio is off by up to 6e-8, here all alike.
    short_q, short_p = (
        NormalInverseWishart(q.m0.float(), q.V0.float(), q.l0, q.n0),
        NormalInverseWishart(p.m0.float(), p.V0.float(), p.l0, p.n0),
    )
    assert niw_kl(short_q, short_p).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("d", [1, 3])
def test_niw_kl_is_least_where_the_two_agree(d: int) -> None:
    q, p = two_niws(d)
    m0, V0 = p.m0.clone().requires_grad_(), p.V0.clone().requires_grad_()
    niw_kl(NormalInverseWishart(m0, V0, p.l0, p.n0), p).backward()
    # The gradient is a difference of terms of order 1, which leaves 1e-15.
    assert m0.grad is not None and V0.grad is not None
    assert max(m0.grad.abs().max().item(), V0.grad.abs().max().item()) < 1e-14
    assert niw_kl(q, p).item() > 0


@pytest.mark.parametrize("d", [1, 2, 3])
def test_expected_log_gaussian_is_the_mean_of_the_log_density(d: int) -> None:
    q, _ = two_niws(d)
    mean, variance = vector(0.6, -0.5, 0.1)[:d], vector(0.3, 0.5, 0.2)[:d]
    num, random = 200_000, np.random.default_rng(100 + d)
    mu, Sigma = draw_niw(q, num, seed=10 + d)
    # Correlated coordinates: only the diagonal of the covariance of theta may matter.
    correlation = np.full((d, d), 0.5) + 0.5 * np.eye(d)
    deviation = np.sqrt(variance.numpy())
    covariance = np.broadcast_to(correlation * np.outer(deviation, deviation), (num, d, d))
    theta = gaussian_rows(random, np.broadcast_to(mean.numpy(), (num, d)), covariance)
    expected = expected_log_gaussian(q, mean, variance)
    # The least term, d / (2 l0), is 5 percent of the whole or more.
    assert_mean(log_gaussian(theta, mu, Sigma), expected.item(), relative=0.03)
    batch = expected_log_gaussian(q, torch.stack([mean, q.m0]), variance)  # leading axes
    assert batch.shape == (2,) and batch[0] == expected and batch[1] > expected


def test_mode_is_the_argmax_of_the_inverse_wishart_marginal() -> None:
    # The paper's mode (appeq:niw_phi*) maximises the marginal density of Sigma, not the joint
    # density of (mu, Sigma).
    q, _ = two_niws(3)
    mu, Sigma = q.mode()
    assert torch.equal(mu, q.m0)
    lower = np.tril_indices(3)

    def argmax(with_mu: bool) -> np.ndarray:
        def negative(entries: np.ndarray) -> float:
            L = np.zeros((3, 3))
            L[lower] = entries
            S = L @ L.T
            value = stats.invwishart.logpdf(S, df=q.n0, scale=np.diag(q.V0.numpy()))
            if with_mu:
                value += log_gaussian(q.m0.numpy()[None], q.m0.numpy()[None], S[None] / q.l0)[0]
            return -float(value)

        start = np.linalg.cholesky(0.3 * np.eye(3) + 0.05)[lower]
        found = optimize.minimize(negative, start, method="BFGS", options={"gtol": 1e-6})
        L = np.zeros((3, 3))
        L[lower] = found.x
        return L @ L.T

    # BFGS with numerical gradients stops near 1e-6; one more or less in the denominator moves Sigma
    # by 6 percent.
    np.testing.assert_allclose(argmax(with_mu=False), np.diag(Sigma.numpy()), atol=1e-5)
    np.testing.assert_allclose(
        argmax(with_mu=True), np.diag(q.V0.numpy()) / (q.n0 + 3 + 2), atol=1e-5
    )


def test_mean_precision_and_mean_log_det() -> None:
    q, _ = two_niws(3)
    _, Sigma = draw_niw(q, 40_000, seed=3)
    precision = np.linalg.inv(Sigma)
    for k in range(3):
        assert_mean(precision[:, k, k], q.mean_precision()[k].item(), relative=0.02)
    assert_mean(np.linalg.slogdet(Sigma)[1], q.mean_log_det().item(), relative=0.01)


# --- Gaussians and spiky mixtures
def test_gaussian_kl_is_that_of_torch_and_its_gradient_a_pull() -> None:
    prior_mean, prior_variance, variance = (
        vector(0.1, -0.4, 2.0),
        vector(0.5, 1.5, 0.1),
        vector(0.3, 0.2, 0.1),
    )
    mean = torch.stack([vector(1.0, 2.0, 3.0), vector(-1.0, 0.0, 2.5)]).requires_grad_()
    kl = gaussian_kl(mean, variance, prior_mean, prior_variance)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(mean, variance.sqrt()), normal(prior_mean, prior_variance.sqrt())
    ).sum(-1)
    torch.testing.assert_close(
        kl, expected, rtol=1e-13, atol=0
    )  # square roots taken and squared again: a few roundings
    (gradient,) = torch.autograd.grad(kl.sum(), mean)
    torch.testing.assert_close(gradient, (mean - prior_mean) / prior_variance, rtol=1e-14, atol=0)
    assert gaussian_kl(prior_mean, prior_variance, prior_mean, prior_variance).item() == 0.0


# --- mixtures with means r
def test_mixture_by_definition() -> None:
    random = generator(21)
    m, r = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (6, 3))
    kernel = torch.exp(
        -((m[:, None] - r[None]) ** 2).sum(-1) / (2 * 0.8)
    )  # eq:mix_client_opt2, safe at these distances
    torch.testing.assert_close(log_mixture(m, r, 0.8).exp(), kernel, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        responsibilities(m, r, 0.8), kernel / kernel.sum(-1, keepdim=True), rtol=1e-13, atol=0
    )
    torch.testing.assert_close(
        mixture_penalty(m, r, 0.8), -kernel.sum(-1).log(), rtol=1e-13, atol=1e-13
    )
    assert log_mixture(m.reshape(2, 3, 4), r, 0.8).shape == (2, 3, 3) and log_mixture(
        m[0], r, 0.8
    ).shape == (3,)


def test_gradient_of_the_mixture_penalty_is_the_mean_pull() -> None:
    random = generator(22)
    m, r = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (6, 3))
    m[0] = r[1]  # at a distance of zero the gradient must still be finite
    m.requires_grad_()
    (gradient,) = torch.autograd.grad(mixture_penalty(m, r, 0.8).sum(), m)
    pull = torch.einsum("ij,ijd->id", responsibilities(m, r, 0.8), m[:, None] - r[None]) / 0.8
    torch.testing.assert_close(gradient, pull, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixture_is_finite_far_away(dtype: torch.dtype) -> None:
    # Distances of 1e6 and exponents of -5e12: their exponentials are zero even in float64.
    m = torch.tensor([[1e6, 0.0], [0.0, 1e6]], dtype=dtype, requires_grad=True)
    r = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=dtype)
    c, penalty = responsibilities(m, r, 0.1), mixture_penalty(m, r, 0.1)
    assert c.isfinite().all() and penalty.isfinite().all()
    torch.testing.assert_close(c.sum(-1), torch.ones(2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(penalty.sum(), m)
    assert gradient.isfinite().all()
    assert penalty[0].item() == pytest.approx(1e12 / 0.2, rel=1e-6)


def test_small_variance_gives_hard_assignment() -> None:
    random = generator(23)
    m, r = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (50, 3))
    nearest = torch.cdist(m, r).argmin(-1)
    one_hot = torch.nn.functional.one_hot(nearest, 3).double()
    # Every other responsibility is below exp(-gap / 2e-6) for the smallest gap between squared
    # distances: under 1e-200.
    first, second = torch.cdist(m, r).square().sort(-1).values[:, :2].unbind(-1)
    assert (second - first).min() > 1e-3
    torch.testing.assert_close(responsibilities(m, r, 1e-6), one_hot, rtol=0, atol=1e-100)
    squared = ((m - r[nearest]) ** 2).sum(-1)
    torch.testing.assert_close(mixture_penalty(m, r, 1e-6) * 2e-6, squared, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        responsibilities(m, r, 1e12), torch.full_like(one_hot, 1 / 3)
    )  # and a large one none


def test_float32_distances_of_millions_of_coordinates() -> None:
    # Coordinates of order 1: squared norms of 3.2e6, where float32 numbers are 0.25 apart; squared
    # distance 9.1.
    d, random = 3_200_000, generator(24)
    m = torch.randn(d, generator=random)
    r = m + math.sqrt(9.1 / d) * torch.randn(d, generator=random)
    truth = (m.double() - r.double()).square().sum().item()
    assert truth == pytest.approx(9.1, abs=0.05)
    assert -log_mixture(m, r[None], 0.5).item() == pytest.approx(truth, abs=1e-3)
    # The bound has teeth: expanding the square in float32 gives a multiple of 0.25.
    expanded = (m.square().sum() + r.square().sum() - 2 * (m * r).sum()).item()
    assert abs(expanded - truth) > 0.05


# --- what is refused
def test_impossible_parameters_are_refused() -> None:
    one, two = vector(1.0), vector(1.0, 2.0)
    with pytest.raises(ValueError, match="length"):
        NormalInverseWishart(one, two, 1.0, 5.0)
    with pytest.raises(ValueError, match=r"n0 .*1\.0.*n0 > 1"):
        NormalInverseWishart(two, two, 1.0, 1.0)
    NormalInverseWishart(two, two, 1.0, 1.0, "per_coordinate")  # enough in one dimension
    with pytest.raises(ValueError, match=r"l0 .*0"):
        NormalInverseWishart(two, two, 0.0, 5.0)
    with pytest.raises(ValueError, match=r"dof .*'half'"):
        NormalInverseWishart(two, two, 1.0, 5.0, "half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nu .*nan"):
        StudentT(math.nan, two, two, joint=True)
    with pytest.raises(ValueError, match="dof"):
        niw_kl(
            NormalInverseWishart(two, two, 1.0, 5.0),
            NormalInverseWishart(two, two, 1.0, 5.0, "per_coordinate"),
        )
