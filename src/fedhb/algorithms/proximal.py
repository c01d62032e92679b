"""The prior's pull as a proximal step of stochastic gradient descent with momentum.

The step, for a loss with gradient g and a penalty mu/2 ||m - target||^2:

    v  <- momentum v + g
    m' <- m - lr v
    m+ <- (m' + lr mu target) / (1 + lr mu)
    v  <- v + (m' - m+) / lr

It is stable for every mu, and bit-equal to plain SGD at mu = 0. Its fixed point is the minimiser of loss plus penalty: the last
line makes the velocity that of the whole objective; without it the penalty would act (1 - momentum) times as strong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhb.algorithms.base import Plan

BLOCK = 2**14
"""Coordinates updated at once: few enough for a step's passes over them to stay in a core's cache."""


@dataclass(frozen=True)
class Pull:
    """The penalty mu/2 ||m - target||^2 of each client, per example.

    Attributes:
        mu: strength [1 or C, 1 or d].
        target: [d] or [C, d]; where it follows m, the K points [K, d] that it is a mean of.
        shares: the weights of that mean at the clients' m, [A, d] -> [A, K].
    """

    mu: Tensor
    target: Tensor
    shares: Callable[[Tensor], Tensor] | None = None

    def towards(self, m: Tensor) -> Tensor:
        """The target of clients at m [A, d]."""
        return self.target if self.shares is None else self.shares(m) @ self.target


class Descent:
    """The proximal momentum step on some of the weights of C clients [C, k], in place.

    With v <- momentum v + g done, the other lines of the module's docstring are two, and without momentum, with
    m <- m - lr g done, they are one:

        v <- keep v + keep mu (m - target),   m <- m - lr v,         keep = 1 / (1 + lr mu)
        m <- keep m + (1 - keep) target
    """

    def __init__(self, value: Tensor, plan: Plan, pull: Pull | None):
        self.value, self.lr, self.pull = value, plan.lr, pull
        self.velocity = torch.zeros_like(value) if plan.momentum else value.new_zeros(0)
        self._shares: Tensor | None = None
        if pull is not None:
            mu = pull.mu.to(value.dtype)
            self.keep = 1.0 / (1.0 + plan.lr * mu)
            self.stiffness = mu * self.keep if plan.momentum else -plan.lr * mu * self.keep
            self.offset = None if pull.shares else -self.stiffness * pull.target
            self.scratch = value.new_empty(len(value), min(BLOCK, value.shape[1]))

    def aim(self, active: slice | Tensor) -> None:
        """Where the pull goes, at the m that the gradient is taken at."""
        if self.pull is not None and self.pull.shares is not None:
            self._shares = self.pull.shares(self.value[active])

    def step(self, active: slice | Tensor, into: Tensor) -> None:
        """What is left to do for the active clients: `into` [A, k] is momentum v + g, or m - lr g without momentum."""
        if not len(self.velocity):
            if self.pull is not None:
                for part in self._blocks():
                    self._draw(None, into[:, part], active, part)
            return
        m, v = self.value[active], into
        for part in self._blocks():
            if self.pull is not None:
                self._draw(m[:, part], v[:, part], active, part)
            m[:, part].add_(v[:, part], alpha=-self.lr)
        if not isinstance(active, slice):
            self.value[active], self.velocity[active] = m, v

    def _blocks(self) -> list[slice]:
        return [slice(start, start + BLOCK) for start in range(0, self.value.shape[1], BLOCK)]

    def _draw(self, m: Tensor | None, x: Tensor, active: slice | Tensor, part: slice) -> None:
        """x <- keep x + stiffness (m - target) on these columns, with m = 0 where there is none."""
        assert self.pull is not None
        keep, stiffness = (_cut(c, active, part) for c in (self.keep, self.stiffness))
        gap = self.scratch[: len(x), : x.shape[1]]
        if self.offset is None:
            assert self._shares is not None
            points = self.pull.target[:, part]
            if m is None:
                torch.mm(self._shares, points, out=gap).neg_()
            else:
                torch.addmm(m, self._shares, points, alpha=-1.0, out=gap)
            _add_scaled(gap.mul_(stiffness), x, keep, out=x)
        elif m is None:
            _add_scaled(_cut(self.offset, active, part), x, keep, out=x)
        else:
            _add_scaled(_cut(self.offset, active, part), m, stiffness, out=gap)
            _add_scaled(gap, x, keep, out=x)


def _cut(values: Tensor, active: slice | Tensor, part: slice) -> Tensor:
    """The active clients' rows of values that each client has its own of [C, ...] or all share [1, ...], and these columns."""
    rows = values if len(values) == 1 else values[active]
    return rows if rows.shape[1] == 1 else rows[:, part]


def _add_scaled(base: Tensor, values: Tensor, scale: Tensor, out: Tensor) -> None:
    """out <- base + scale values; a scale that is one number is cheaper as a number."""
    if scale.numel() == 1:
        torch.add(base, values, alpha=float(scale), out=out)
    else:
        torch.addcmul(base, values, scale, out=out)
