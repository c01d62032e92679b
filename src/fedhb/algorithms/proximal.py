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


class Momentum:
    """The proximal momentum step on one block of coordinates [C, k], in place.

    With v <- momentum v + g done, the other lines of the module's docstring are two:

        v <- keep (v + mu (m - target)),   keep = 1 / (1 + lr mu)
        m <- m - lr v
    """

    def __init__(self, value: Tensor, plan: Plan, pull: Pull | None):
        self.value, self.lr, self.pull = value, plan.lr, pull
        self.velocity = torch.zeros_like(value)
        if pull is not None:
            mu = pull.mu.to(value.dtype)
            self.keep = 1.0 / (1.0 + plan.lr * mu)
            self.stiffness = mu * self.keep
            self.offset = None if pull.shares else -self.stiffness * pull.target
            self.scratch = value.new_empty(len(value), min(BLOCK, value.shape[1]))

    def step(self, active: slice | Tensor, v: Tensor) -> None:
        """One step of the active clients, v [A, k] being momentum v + g."""
        m = self.value[active]
        shares = None if self.pull is None or self.pull.shares is None else self.pull.shares(m)
        for start in range(0, m.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            if self.pull is not None:
                self._draw(m[:, part], v[:, part], shares, active, part)
            m[:, part].add_(v[:, part], alpha=-self.lr)
        if not isinstance(active, slice):
            self.value[active], self.velocity[active] = m, v

    def _draw(self, m: Tensor, v: Tensor, shares: Tensor | None, active: slice | Tensor, part: slice) -> None:
        """v <- keep v + keep mu (m - target) on these columns."""
        assert self.pull is not None
        gap = self.scratch[: len(m), : m.shape[1]]
        keep, stiffness = (_cut(c, active, part) for c in (self.keep, self.stiffness))
        if self.offset is not None:
            _add_scaled(_cut(self.offset, active, part), m, stiffness, out=gap)
        else:
            assert shares is not None
            torch.addmm(m, shares, self.pull.target[:, part], alpha=-1.0, out=gap)
            gap.mul_(stiffness)
        _add_scaled(gap, v, keep, out=v)


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
