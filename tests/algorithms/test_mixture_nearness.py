"""How near clients are to each prototype."""

from __future__ import annotations

import torch
from problems import generator, normal
from scattered_clients import SIGMA2, D, K, c_by_hand, scattered

from fedhb.algorithms.mixture import Nearness


def test_nearness_ranks_by_distance() -> None:
    m, r = scattered(), normal(K, D, seed=3)
    distances = (m.unsqueeze(1) - r).square().sum(-1)
    nearness = Nearness(r, SIGMA2)
    shares, near = nearness.responsibilities(m), nearness.scores(m)
    for j in range(K):
        # Sums of four products of numbers near one.
        expected = -0.5 * (distances - distances[:, j : j + 1])
        torch.testing.assert_close(near - near[:, j : j + 1], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(shares, c_by_hand(m, r), rtol=0, atol=1e-13)


def test_nearness_is_that_of_the_current_m() -> None:
    """The products of the last m are used for that m alone: not once it has moved, nor for
    other rows of it.
    """
    m, r = scattered(), normal(K, D, seed=3)
    nearness = Nearness(r, SIGMA2)
    first = nearness.scores(m)
    assert nearness.scores(m[:]) is first
    for move in (lambda: m.add_(1.0), lambda: m[2].mul_(2.0), lambda: m[:, 1:].zero_()):
        move()
        assert torch.equal(nearness.scores(m), Nearness(r, SIGMA2).scores(m))
    for rows in (slice(0, 4), slice(1, 5), torch.tensor([3, 1]), torch.tensor([2, 0])):
        assert torch.equal(nearness.scores(m[rows]), Nearness(r, SIGMA2).scores(m[rows]))


def test_nearness_keeps_its_digits_in_float32() -> None:
    d, generator_ = 200_000, generator(0)
    body = 0.02 * torch.randn(d, generator=generator_, dtype=torch.float64) + 0.02
    r = (body + 1e-3 * torch.randn(2, d, generator=generator_, dtype=torch.float64)).float()
    m = (body + 2e-3 * torch.randn(1, d, generator=generator_, dtype=torch.float64)).float()
    exact = -0.5 * (m.double().unsqueeze(1) - r.double()).square().sum(-1)
    near = Nearness(r, SIGMA2).scores(m)
    expanded = m @ r.T - 0.5 * r.square().sum(1)
    gap = exact[0, 0] - exact[0, 1]
    error, naive = (abs(v[0, 0] - v[0, 1] - gap).item() for v in (near, expanded))
    # The products are of size 0.03 * 1e-3 each, 200 000 of them of either sign: sums near 1e-2 with
    # seven digits. To expand the squares sums 200 000 products of size 1e-3: near 100, with seven
    # digits.
    assert error < 1e-6 < 1e-5 < naive
