"""A personal Gaussian and the prior around it: the KL and its slopes."""

from __future__ import annotations

import pytest
import torch
from problems import normal
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

from fedhb.algorithms.pfedbayes import kl, kl_of_q, kl_of_w, spread


def some_values(count: int = 60) -> Tensor:
    """Means around zero, rhos from about -8 to 2: sigma from 3e-4 to 2."""
    values = normal(4, count, seed=3)
    values[1::2] = 2.0 * values[1::2] - 3.0
    return values


def test_the_kl_is_that_of_two_normals() -> None:
    values = some_values()
    q, w = (Normal(mean, softplus(rho)) for mean, rho in (values[:2], values[2:]))
    # A value of up to 1e6 and, near zero, differences of numbers near one.
    torch.testing.assert_close(kl(values), kl_divergence(q, w), rtol=1e-13, atol=1e-13)


def test_the_slopes_are_those_of_autograd() -> None:
    values = some_values().requires_grad_()
    (slope,) = torch.autograd.grad(kl(values).sum(), values)
    mean, rho, prior_mean, prior_rho = values.detach()
    q = kl_of_q(softplus(rho), rho.sigmoid(), softplus(prior_rho))
    w = kl_of_w(prior_mean - mean, softplus(rho), prior_rho.sigmoid(), softplus(prior_rho))
    for row, (ours, curvature) in ((1, q), (3, w)):
        # Where the two terms of a slope in rho cancel, what is left rounds relative to the terms,
        # which are near one.
        torch.testing.assert_close(ours, slope[row], rtol=1e-12, atol=1e-12)
        assert (curvature >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigma_and_its_slope_are_the_same_wherever_a_weight_lies(dtype: torch.dtype) -> None:
    """To the last bit: alone, in any piece, and in a column. torch's own softplus and sigmoid are
    not.
    """
    rho = (3.0 * normal(2000, seed=4) - 3.0).to(dtype)
    whole = torch.stack(spread(rho))
    torch.testing.assert_close(
        whole.double(), torch.stack([softplus(rho.double()), rho.double().sigmoid()])
    )
    column = rho.repeat_interleave(3).view(-1, 3)[:, 1]
    assert torch.equal(torch.stack(spread(column)), whole)
    for width in (1, 37, 100):
        assert torch.equal(
            torch.cat([torch.stack(spread(piece)) for piece in rho.split(width)], 1), whole
        )
    assert torch.stack(spread(torch.tensor([200.0], dtype=dtype))).isfinite().all()
