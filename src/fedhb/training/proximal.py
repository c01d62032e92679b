"""The prior's pull as a proximal step of stochastic gradient descent with momentum.

The step, for a loss with gradient g and a penalty mu/2 ||m - target||^2:

    v  <- momentum v + g
    m' <- m - lr v
    m+ <- (m' + lr mu target) / (1 + lr mu)
    v  <- v + (m' - m+) / lr

It is stable for every mu, and bit-equal to plain SGD at mu = 0. Its fixed point is the minimiser of
loss plus penalty: the last line makes the velocity that of the whole objective. Without it the
penalty would act (1 - momentum) times as strong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhb.training.plan import Plan

COORDINATES_AT_ONCE = 2**14
"""Coordinates updated at once, so few that a step's passes over them stay in a core's cache."""


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
        """Return the target of clients at m [A, d]."""
        return self.target if self.shares is None else self.shares(m) @ self.target


@dataclass(frozen=True)
class Penalty:
    """The regularisation of a client's training: pulls on its weights, and dropout of columns.

    Attributes:
        pull: on theta, None for no pull.
        head_pull: on the head, None for no pull.
        p_do: each column of the body is kept with this probability, drawn anew for every batch and
            client (eq:spiky2).
    """

    pull: Pull | None = None
    head_pull: Pull | None = None
    p_do: float = 1.0


NO_PENALTY = Penalty()


class Descent:
    """The proximal momentum step on some of the weights of C clients [C, k], in place.

    The gradient was added before (network/gradients.py): `x` [A, k] is momentum v + g, or without
    momentum m - lr g, in the weights themselves. With keep = 1 / (1 + lr mu) the other lines of the
    module's docstring are these, the first two with momentum, the last without:

        v <- keep v + keep mu (m - target)
        m <- m - lr v
        m <- keep m + (1 - keep) target

    The first and the last are one operation, x <- keep x + stiffness (m - target), with
    stiffness = keep mu, or -lr mu keep and m = 0.
    """

    def __init__(self, value: Tensor, plan: Plan, pull: Pull | None):
        self.value, self.lr, self.pull = value, plan.lr, pull
        self.velocity = torch.zeros_like(value) if plan.momentum else value.new_zeros(0)
        self._shares = value.new_zeros(0)
        self._blocks_of_first: dict[int, list[_Block]] = {}
        if pull is not None:
            mu = pull.mu.to(value.dtype)
            self.keep = 1.0 / (1.0 + plan.lr * mu)
            self.stiffness = mu * self.keep if plan.momentum else -plan.lr * mu * self.keep

    def aim(self, active: slice | Tensor) -> None:
        """Find the target of a pull that follows m, at the m that the gradient is taken at."""
        if self.pull is not None and self.pull.shares is not None:
            self._shares = self.pull.shares(self.value[active])

    def step(self, active: slice | Tensor, x: Tensor) -> None:
        """Do the rest of the step for the active clients, for x [A, k] with the gradient in it."""
        moving = len(self.velocity) > 0
        if self.pull is None and not moving:
            return
        m = self.value[active] if moving else None
        for block in self._blocks(active, m, x):
            if self.pull is not None:
                self._draw(block)
            if block.m is not None:
                block.m.add_(block.x, alpha=-self.lr)
        if m is not None and not isinstance(active, slice):
            self.value[active], self.velocity[active] = m, x

    def _blocks(self, active: slice | Tensor, m: Tensor | None, x: Tensor) -> list[_Block]:
        """Return the active clients' rows in blocks of columns.

        Where the active clients are the first ones, the blocks are made once for all steps.
        """
        if isinstance(active, slice) and active.stop in self._blocks_of_first:
            return self._blocks_of_first[active.stop]
        blocks = []
        for part, columns in self._parts(x.shape[1]):
            block = _Block(x[:, part], None if m is None else m[:, part])
            if self.pull is not None:
                self._set_pull(block, self.pull, active, part, columns)
            blocks.append(block)
        if isinstance(active, slice):
            self._blocks_of_first[active.stop] = blocks
        return blocks

    def _set_pull(
        self, block: _Block, pull: Pull, active: slice | Tensor, part: slice, columns: slice
    ) -> None:
        """Set what pulls the active clients' coordinates `part`, whose mu is in these columns."""
        keep = _rows_of(self.keep, active, columns)
        stiffness = _rows_of(self.stiffness, active, columns)
        block.keep, block.stiffness = _number(keep), _number(stiffness)
        block.points = pull.target[..., part]
        if pull.shares is None:
            target = _rows_of(torch.atleast_2d(pull.target), active, part)
            block.offset = -stiffness * target

    def _parts(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield the coordinates of each block, and the columns of mu that are theirs.

        No block lies across two layers.
        """
        layers = self.pull.layers if self.pull is not None else ()
        begin = 0
        for layer, count in enumerate(layers or [size]):
            for start in range(begin, begin + count, COORDINATES_AT_ONCE):
                part = slice(start, min(start + COORDINATES_AT_ONCE, begin + count))
                yield part, slice(layer, layer + 1) if layers else part
            begin += count

    def _draw(self, block: _Block) -> None:
        """Do x <- keep x + stiffness (m - target), with m = 0 where there is none."""
        m, x, keep, stiffness = block.m, block.x, block.keep, block.stiffness
        if block.offset is not None:  # -stiffness target, which stays
            pulled = block.offset if m is None else _add_scaled(block.offset, m, stiffness)
            _add_scaled(pulled, x, keep, out=x)
        elif isinstance(stiffness, float) and isinstance(keep, float):
            shares, points = self._shares, block.points
            if m is None:
                torch.addmm(x, shares, points, beta=keep, alpha=-stiffness, out=x)
            else:
                pulled = torch.addmm(m, shares, points, beta=stiffness, alpha=-stiffness)
                torch.add(pulled, x, alpha=keep, out=x)
        else:
            target = torch.mm(self._shares, block.points)
            gap = target.neg_() if m is None else torch.sub(m, target, out=target)
            _add_scaled(gap.mul_(stiffness), x, keep, out=x)


@dataclass
class _Block:
    """Some columns of x, of m, and of what pulls them: views.

    Attributes:
        x: [A, k]; see `Descent`.
        m: [A, k], None without momentum.
        keep, stiffness: [1 or A, 1 or k], or a number for all.
        offset: -stiffness target, None where the target follows m.
        points: the target's columns.
    """

    x: Tensor
    m: Tensor | None
    keep: Tensor | float = 1.0
    stiffness: Tensor | float = 0.0
    offset: Tensor | None = None
    points: Tensor = field(default_factory=lambda: torch.zeros(0))


def _rows_of(values: Tensor, active: slice | Tensor, columns: slice) -> Tensor:
    """Return the active clients' rows and these columns of values [1 or C, 1 or k]."""
    rows = values if len(values) == 1 else values[active]
    return rows if rows.shape[1] == 1 else rows[:, columns]


def _number(values: Tensor) -> Tensor | float:
    """Return a number instead of a tensor of one: it is cheaper."""
    return float(values) if values.numel() == 1 else values


def _add_scaled(
    base: Tensor, values: Tensor, scale: Tensor | float, out: Tensor | None = None
) -> Tensor:
    """Return base + scale values."""
    if isinstance(scale, float):
        return torch.add(base, values, alpha=scale, out=out)
    return torch.addcmul(base, values, scale, out=out)
