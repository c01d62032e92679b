"""A personal Gaussian q_i and the global w around it, for C clients: the steps of pfedbayes.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedhb.distributions import total
from fedhb.training.plan import Plan
from fedhb.training.proximal import BLOCK


class Pair:
    """q_i and w of C clients over k coordinates, and their alternating steps.

    Args:
        values: the means and rhos of q_i and w, [4, C, k].
        strength: zeta / |D_i| [C, 1].
        plan: learning rate and momentum.
    """

    def __init__(self, values: Tensor, strength: Tensor, plan: Plan):
        self.values, self.strength, self.plan = values, strength, plan
        self.velocities = torch.zeros_like(values)
        self.noise = torch.empty_like(values[0])
        self.sigma = self.rise = values[1]  # those of the last draw

    def draw(self, active: slice | Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """theta ~ q_i for the active clients [A, k], each with noise from its own generator."""
        for row, generator in zip(self.noise, generators, strict=False):
            row.copy_(torch.randn(len(row), generator=generator, dtype=torch.float32))
        mean, rho = self.values[:2, active]
        self.sigma, self.rise = spread(rho)
        return torch.addcmul(mean, self.sigma, self.noise[: len(generators)])

    def step(self, active: slice | Tensor, gradient: Tensor) -> None:
        """A step of q_i and one of w, given the gradient of the mean loss at the drawn theta [A, k]."""
        values, velocities, strength = (
            self.values[:, active],
            self.velocities[:, active],
            self.strength[active],
        )
        width = max(1, BLOCK // len(gradient))
        for begin in range(0, gradient.shape[1], width):
            part = (..., slice(begin, begin + width))
            self._alternate(part, values[part], velocities[part], gradient[part], strength)
        if not isinstance(active, slice):
            self.values[:, active], self.velocities[:, active] = values, velocities

    def _alternate(
        self, part: Any, values: Tensor, velocities: Tensor, gradient: Tensor, strength: Tensor
    ) -> None:
        mean, rho, prior_mean, prior_rho = values
        noise, rise = self.noise[: len(gradient)][part], self.rise[part]
        prior_sigma, prior_rise = spread(prior_rho)
        slope, curvature = kl_of_q(self.sigma[part], rise, prior_sigma)
        slope = slope.mul_(strength).add_(
            (gradient * noise).mul_(rise)
        )  # d theta / d rho = noise d sigma / d rho
        self._descend(rho, velocities[1], slope, curvature.mul_(strength))
        self._descend(mean, velocities[0], gradient)
        prior_mean.add_(velocities[2].mul_(self.plan.momentum), alpha=-self.plan.lr)
        stiffness = strength / prior_sigma.square().add_(
            strength, alpha=self.plan.lr
        )  # k / (1 + lr k)
        self._pull(prior_mean, velocities[2], mean, stiffness)
        self._pull(mean, velocities[0], prior_mean, stiffness)
        slope, curvature = kl_of_w(prior_mean - mean, spread(rho)[0], prior_rise, prior_sigma)
        self._descend(prior_rho, velocities[3], slope.mul_(strength), curvature.mul_(strength))

    def _descend(
        self, value: Tensor, velocity: Tensor, slope: Tensor, curvature: Tensor | None = None
    ) -> None:
        velocity.mul_(self.plan.momentum).add_(slope)
        if curvature is not None:
            velocity.div_(curvature.mul_(self.plan.lr).add_(1.0))
        value.add_(velocity, alpha=-self.plan.lr)

    def _pull(self, value: Tensor, velocity: Tensor, target: Tensor, stiffness: Tensor) -> None:
        force = (value - target).mul_(stiffness)
        velocity.add_(force)
        value.add_(force, alpha=-self.plan.lr)

    def kl(self) -> Tensor:
        """KL(q_i || w) [C]."""
        return torch.stack([total(kl(row)) for row in self.values.unbind(1)])


def spread(rho: Tensor) -> tuple[Tensor, Tensor]:
    """sigma = softplus(rho) and d sigma / d rho.

    By exp and log1p: torch's softplus and sigmoid round by an element's place in its row, and so by who is trained beside whom.
    """
    e = rho.clamp(
        max=80.0
    ).exp_()  # it would overflow beyond: sigma ends at 80, where no network is left
    return torch.log1p(e), e / (e + 1.0)


def kl(values: Tensor) -> Tensor:
    """KL(q || w) of each coordinate, for the means and rhos of q and w [4, ...]."""
    mean, rho, prior_mean, prior_rho = values
    sigma, prior_sigma = spread(rho)[0], spread(prior_rho)[0]
    return (
        (prior_sigma / sigma).log()
        + (sigma.square() + (mean - prior_mean).square()) / (2 * prior_sigma.square())
        - 0.5
    )


def kl_of_q(sigma: Tensor, rise: Tensor, prior_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of the KL in rho of q, and its curvature but for the bend of softplus; rise = d sigma_q / d rho_q."""
    relative = rise / sigma
    ratio = prior_sigma.pow(-2).mul_(sigma).mul_(rise)
    return ratio - relative, (ratio + relative).mul_(relative)


def kl_of_w(
    gap: Tensor, sigma: Tensor, prior_rise: Tensor, prior_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in rho of w, gap = mu_w - mu_q; also without the curvature of the logarithm, which is negative."""
    relative = prior_rise / prior_sigma
    spread = sigma.square().addcmul_(gap, gap).div_(prior_sigma.square())
    return relative - relative * spread, relative.square().mul_(spread).mul_(2.0)
