"""The lengthened step: exact on one curvature, faster on many, and the usual one where cohorts are
noise.
"""

from __future__ import annotations

import pytest
import torch

from fedhb.algorithms.empirical_bayes import variance
from fedhb.algorithms.empirical_bayes.server_step import (
    FACTOR,
    along,
    at_rest,
    lengthened,
    stretch_of,
)


def descend(
    shares: torch.Tensor, rounds: int, lengthen: bool, noise: float = 0.0
) -> tuple[torch.Tensor, list[float]]:
    """m0 - m0* after so many rounds that go these shares of the way, and the factors."""
    gap = torch.ones_like(shares)
    server, factors = {"m0": gap, **at_rest([gap])}, []
    for _ in range(rounds):
        new = {
            "m0": server["m0"]
            - shares * server["m0"]
            + noise * torch.randn(len(shares), dtype=shares.dtype)
        }
        server |= new | lengthened(server, new, ["m0"]) if lengthen else new
        factors.append(server[FACTOR].item())
    return server["m0"], factors


@pytest.mark.parametrize("share", [0.5, 0.7, 0.99])
def test_one_curvature_is_solved_by_the_second_step(share: float) -> None:
    """omega_1 = 1/a, which ends at the optimum."""
    gap, factors = descend(torch.full((5,), share, dtype=torch.float64), 2, lengthen=True)
    assert factors == [1.0, pytest.approx(1 / share)]
    assert gap.abs().max() < 1e-15


def test_it_is_faster_where_the_data_say_little() -> None:
    shares = torch.logspace(-2, 0, 50, dtype=torch.float64)
    plain, longer = (descend(shares, 60, lengthen)[0].norm() for lengthen in (False, True))
    assert longer < 0.7 * plain
    _, factors = descend(shares, 2000, lengthen=True)
    assert all(1.0 <= omega <= 2.0 for omega in factors)
    assert descend(shares, 2000, lengthen=True)[0].norm() < 1e-6  # and it converges


def test_noise_is_not_lengthened() -> None:
    """Where each cohort moves m0 about and there is nothing to gain, the step is the usual one."""
    torch.manual_seed(0)
    _, factors = descend(
        torch.full((10_000,), 0.5, dtype=torch.float64), 30, lengthen=True, noise=10.0
    )
    assert factors == [1.0] * 30


@pytest.mark.parametrize(
    ("curvature", "precision"), [(0.0, 3.0), (0.5, 2.0), (2.0, 0.5), (40.0, 10.0)]
)
def test_a_step_as_if_the_prior_had_gone_along(curvature: float, precision: float) -> None:
    """Gradient flow of three clients under a prior that stays at m0, and under one whose mean is
    theirs at every moment.
    """
    optima, time, steps = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), 0.3, 30_000
    slopes = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)  # where the loss is linear

    def flow(goes_along: bool) -> float:
        m = torch.zeros(3, dtype=torch.float64)
        for _ in range(steps):
            mean = m.mean() if goes_along else 0.0
            gradient = curvature * (m - optima) if curvature else -slopes
            m = m - time / steps * (gradient + precision * (m - mean))
        return float(m.mean())

    omega = along(torch.tensor([curvature]), torch.tensor([precision]), time).item()
    assert 1.0 < omega < 2.0
    assert omega * flow(False) == pytest.approx(flow(True), rel=1e-3)


@pytest.mark.parametrize(
    ("count", "lambda0", "precision"), [(100, 1.0, 4.0), (5, 1.0, 3.0), (3, 2.0, 1.0)]
)
def test_a_prior_on_mu_is_weight_decay_while_clients_train(
    count: int, lambda0: float, precision: float
) -> None:
    """Gradient flow on slopes from m0 = 2, under a prior that stays there and one whose mean is at
    every moment N / (N + lambda0) times that of the clients.

    Then the model's own optimum, where m0 stays.
    """
    slopes, time, steps = torch.linspace(-1.0, 6.0, count, dtype=torch.float64), 0.3, 20_000

    def flow(goes_along: bool) -> float:
        m = torch.full((count,), 2.0, dtype=torch.float64)
        for _ in range(steps):
            mean = count / (count + lambda0) * m.mean() if goes_along else 2.0
            m = m + time / steps * (slopes - precision * (m - mean))
        return float(m.mean())

    zero, share = torch.zeros(1, dtype=torch.float64), lambda0 / (count + lambda0)
    summary = {"time": torch.tensor([count * time]), "count": torch.tensor(float(count))}
    server = {"m0": torch.full((1,), 2.0, dtype=torch.float64)}
    server |= variance.unlearned(zero)  # nobody has measured a curvature
    stretch = stretch_of(server, summary, [1], zero + precision, share)
    assert 1.0 < stretch.length.item() < 2.0 and stretch.decay.item() > 1e-3

    def step_to(mean: torch.Tensor) -> torch.Tensor:
        return lengthened(server | at_rest([zero]), {"m0": mean}, ["m0"], stretch)["m0"]

    assert step_to(zero + flow(False)).item() == pytest.approx(flow(True), rel=1e-4)
    # d/dmu of lambda0 precision / 2 mu^2 at mu = N / (N + lambda0) m0 is the slopes' sum
    server["m0"] = (slopes.mean() / (share * precision)).reshape(1)
    step = -torch.expm1(torch.tensor(-time * precision)) / precision * slopes.mean()
    stays = step_to(server["m0"] + step)
    torch.testing.assert_close(stays, server["m0"], rtol=1e-6, atol=0.0)
