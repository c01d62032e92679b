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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhb.training.plan import Plan

BLOCK = 2**14
"""Coordinates updated at once: few enough for a step's passes over them to stay in a core's cache."""


@dataclass(frozen=True)
class Pull:
    """The penalty mu/2 ||m - target||^2 of each client, per example.

    Attributes:
        mu: strength [1 or C, 1 or d], or [1 or C, L] for L layers.
        target: [d] or [C, d]; where it follows m, the K points [K, d] that it is a mean of.
        shares: the weights of that mean at the clients' m, [A, d] -> [A, K].
        layers: the number of weights of each layer, where mu is one number a layer.
    """

    mu: Tensor
    target: Tensor
    shares: Callable[[Tensor], Tensor] | None = None
    layers: Sequence[int] = ()

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
        self._shares = value.new_zeros(0)
        self._cut: dict[int, list[_Block]] = {}
        if pull is not None:
            mu = pull.mu.to(value.dtype)
            self.keep = 1.0 / (1.0 + plan.lr * mu)
            self.stiffness = mu * self.keep if plan.momentum else -plan.lr * mu * self.keep

    def aim(self, active: slice | Tensor) -> None:
        """Where the pull goes, at the m that the gradient is taken at."""
        if self.pull is not None and self.pull.shares is not None:
            self._shares = self.pull.shares(self.value[active])

    def step(self, active: slice | Tensor, into: Tensor) -> None:
        """What is left to do for the active clients: `into` [A, k] is momentum v + g, or m - lr g without momentum."""
        moving = len(self.velocity) > 0
        if self.pull is None and not moving:
            return
        m = self.value[active] if moving else None
        for block in self._blocks(active, m, into):
            if self.pull is not None:
                self._draw(block)
            if block.m is not None:
                block.m.add_(block.x, alpha=-self.lr)
        if m is not None and not isinstance(active, slice):
            self.value[active], self.velocity[active] = m, into

    def _blocks(self, active: slice | Tensor, m: Tensor | None, x: Tensor) -> list[_Block]:
        """The active clients' rows, cut; cut once for all steps where they are the first rows."""
        if isinstance(active, slice) and active.stop in self._cut:
            return self._cut[active.stop]
        found = []
        for part, columns in self._parts(x.shape[1]):
            block = _Block(x[:, part], None if m is None else m[:, part])
            if self.pull is not None:
                keep, stiffness = (
                    _cut(values, active, columns) for values in (self.keep, self.stiffness)
                )
                block.keep, block.stiffness, block.points = (
                    _number(keep),
                    _number(stiffness),
                    self.pull.target[..., part],
                )
                if self.pull.shares is None:
                    block.offset = -stiffness * _cut(
                        torch.atleast_2d(self.pull.target), active, part
                    )
            found.append(block)
        if isinstance(active, slice):
            self._cut[active.stop] = found
        return found

    def _parts(self, size: int) -> Iterator[tuple[slice, slice]]:
        """The coordinates of each block, none across two layers, and the columns of mu that are theirs."""
        layers = self.pull.layers if self.pull is not None else ()
        begin = 0
        for layer, count in enumerate(layers or [size]):
            for start in range(begin, begin + count, BLOCK):
                part = slice(start, min(start + BLOCK, begin + count))
                yield part, slice(layer, layer + 1) if layers else part
            begin += count

    def _draw(self, block: _Block) -> None:
        """x <- keep x + stiffness (m - target), with m = 0 where there is none."""
        m, x, keep, stiffness = block.m, block.x, block.keep, block.stiffness
        if block.offset is not None:
            _add_scaled(
                block.offset if m is None else _add_scaled(block.offset, m, stiffness),
                x,
                keep,
                out=x,
            )
        elif isinstance(stiffness, float) and isinstance(keep, float):
            if m is None:
                torch.addmm(x, self._shares, block.points, beta=keep, alpha=-stiffness, out=x)
            else:
                torch.add(
                    torch.addmm(m, self._shares, block.points, beta=stiffness, alpha=-stiffness),
                    x,
                    alpha=keep,
                    out=x,
                )
        else:
            points = torch.mm(self._shares, block.points)
            _add_scaled(
                (points.neg_() if m is None else torch.sub(m, points, out=points)).mul_(stiffness),
                x,
                keep,
                out=x,
            )


@dataclass
class _Block:
    """Some columns of x, and of m, and of what pulls them: views."""

    x: Tensor
    m: Tensor | None
    keep: Tensor | float = 1.0
    stiffness: Tensor | float = 0.0
    offset: Tensor | None = None
    points: Tensor = field(default_factory=lambda: torch.zeros(0))


def _cut(values: Tensor, active: slice | Tensor, part: slice) -> Tensor:
    """The active clients' rows of values that each client has its own of [C, ...] or all share [1, ...], and these columns."""
    rows = values if len(values) == 1 else values[active]
    return rows if rows.shape[1] == 1 else rows[:, part]


def _number(values: Tensor) -> Tensor | float:
    """One number for all is cheaper as a number."""
    return float(values) if values.numel() == 1 else values


def _add_scaled(
    base: Tensor, values: Tensor, scale: Tensor | float, out: Tensor | None = None
) -> Tensor:
    """base + scale values."""
    if isinstance(scale, float):
        return torch.add(base, values, alpha=scale, out=out)
    return torch.addcmul(base, values, scale, out=out)
