"""Minibatches for C clients at once, each client shuffled and augmented by its own randomness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fedhb.clients.checks import refuse_single
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan


@dataclass(frozen=True)
class Batch:
    """One minibatch of each of A clients.

    Attributes:
        active: which clients take this step: a slice (the first A) or their positions [A].
        x: inputs [A, B, ...], as stored.
        y: targets [A, B, ...].
        held: where each example lies among all that the clients hold, a position in
            `clients.train.rows` [A, B].
        counts: the true number of examples of each client; what lies behind is padding.
        valid: 1 for examples, 0 for padding [A, B]; None where nothing is padded.
        generators: the randomness of each client's training, besides the order of its examples.
        last_epoch: whether this is a step of the last epoch.
    """

    active: slice | Tensor
    x: Tensor
    y: Tensor
    held: Tensor
    counts: Sequence[int]
    valid: Tensor | None
    generators: Sequence[torch.Generator]
    last_epoch: bool
    _prepared: dict[int, tuple[Tensor, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def inputs(self, network: Network) -> Tensor:
        """Return x as the network takes it.

        It is prepared once for all networks with the same scaling (a model and its gate).
        """
        key = id(network.scaling)
        x, version = self._prepared.get(key, (self.x, -1))
        if x._version != version:  # not prepared yet, or a module has written into its input
            x = network.prepare(self.x)
            x = x.clone() if x is self.x and not network.batches_clients else x
            self._prepared[key] = x, x._version
        return x


def batches(
    clients: Clients, plan: Plan, rng: Randomness, *, merge_single: bool = False
) -> Iterator[Batch]:
    """Yield shuffled minibatches of all clients, `plan.epochs` times through each client's data.

    A client out of batches takes no part in the rest of the epoch. With `merge_single` a last batch
    of one example joins the one before it (batch norm cannot train on one example).
    """
    if merge_single:
        if plan.batch_size == 1:
            raise InputError(
                "batch_size=1, and batch norm cannot train on one example: give at least 2"
            )
        refuse_single(clients)
    ids, sizes = clients.ids.tolist(), clients.sizes.tolist()
    # the order of the examples is the same for every method, whatever else it draws: dropout,
    # crops, a module's own noise
    orders, generators = [rng(i, "order") for i in ids], [rng(i, "noise") for i in ids]
    device, offsets = clients.train.x.device, clients.train.offsets.tolist()
    steps = _steps(sizes, plan.batch_size, merge_single)
    numbers = [len(step.clients) * step.width for step in steps]
    for epoch in range(plan.epochs):
        shuffled = [
            offset + torch.randperm(n, generator=g)
            for offset, n, g in zip(offsets, sizes, orders, strict=False)
        ]
        # of all steps: one transfer to the device, if it is another one
        positions = torch.cat([part for step in steps for part in step.of(shuffled)])
        held = positions.to(device).split(numbers)
        rows = clients.train.rows[positions].to(device).split(numbers)
        for s, step in enumerate(steps):
            shape = (len(step.clients), step.width)
            step_generators = [generators[k] for k in step.clients]
            # whole rows are copied by index_select; x[rows] would fetch them number by number
            x, y = (
                pool.index_select(0, rows[s]).unflatten(0, shape)
                for pool in (clients.train.x, clients.train.y)
            )
            if clients.augment:
                x = crop_and_flip(x, step_generators, step.counts)
            yield Batch(
                active=step.active,
                x=x,
                y=y,
                held=held[s].view(shape),
                counts=step.counts,
                valid=None if step.valid is None else step.valid.to(device),
                generators=step_generators,
                last_epoch=epoch == plan.epochs - 1,
            )


@dataclass(frozen=True)
class _Step:
    """The minibatches of one step, the same in every epoch.

    Attributes:
        clients: the positions of the clients that have a batch left.
        bounds: where the batch of each begins and ends in the order of its examples.
    """

    clients: list[int]
    bounds: list[tuple[int, int]]

    @cached_property
    def counts(self) -> list[int]:
        """Return the number of examples of each client."""
        return [end - begin for begin, end in self.bounds]

    @cached_property
    def width(self) -> int:
        """Return the largest number of examples."""
        return max(self.counts)

    @cached_property
    def active(self) -> slice | Tensor:
        """Return the clients as a slice where they are the first ones."""
        first = slice(0, len(self.clients))
        return first if self.clients == list(range(first.stop)) else torch.tensor(self.clients)

    @cached_property
    def valid(self) -> Tensor | None:
        """Return 1 for examples and 0 for padding; None where nothing is padded."""
        if min(self.counts) == self.width:
            return None
        counts = torch.tensor(self.counts).unsqueeze(1)
        return (torch.arange(self.width) < counts).to(torch.float32)

    def of(self, shuffled: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the examples of each client's batch, from those of all clients in their order."""
        for k, (begin, end) in zip(self.clients, self.bounds, strict=True):
            part = shuffled[k][begin:end]
            missing = self.width - len(part)
            # padding repeats the first example: any finite input will do, its weight is zero
            yield torch.cat([part, part[:1].expand(missing)]) if missing else part


def _steps(sizes: Sequence[int], width: int, merge_single: bool) -> list[_Step]:
    """Return the steps of an epoch of clients with these numbers of examples."""
    bounds = [batch_bounds(n, width, merge_single) for n in sizes]
    steps = []
    for s in range(max(map(len, bounds))):
        positions = [k for k, b in enumerate(bounds) if s < len(b)]
        steps.append(_Step(positions, [bounds[k][s] for k in positions]))
    return steps


def batch_bounds(n: int, width: int, merge_single: bool) -> list[tuple[int, int]]:
    """Return where the batches of n examples begin and end, in the order of their shuffling."""
    starts = list(range(0, n, width))
    if merge_single and n > width and n % width == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))


def crop_and_flip(
    x: Tensor, generators: Sequence[torch.Generator], counts: Sequence[int], padding: int = 4
) -> Tensor:
    """Return random crops and horizontal flips of images x [A, B, c, h, w], drawn per client.

    The images are padded with zeros, and cut to their size.
    """
    most, (height, width) = x.shape[1], x.shape[-2:]
    padded = functional.pad(x, [padding] * 4)
    top, left, flip = torch.zeros(3, len(x), most, dtype=torch.int64)
    for k, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        top[k, :count] = torch.randint(2 * padding + 1, (count,), generator=generator)
        left[k, :count] = torch.randint(2 * padding + 1, (count,), generator=generator)
        flip[k, :count] = torch.randint(2, (count,), generator=generator)
    rows = top.unsqueeze(-1) + torch.arange(height)
    columns = torch.arange(width).expand(len(x), most, width)
    mirrored = torch.where(flip.bool().unsqueeze(-1), width - 1 - columns, columns)
    columns = left.unsqueeze(-1) + mirrored
    client = torch.arange(len(x)).view(-1, 1, 1, 1)
    example = torch.arange(most).view(1, -1, 1, 1)
    channels_last = padded.movedim(2, -1)
    moved = channels_last[client, example, rows.unsqueeze(-1), columns.unsqueeze(-2)]
    return moved.movedim(-1, 2)  # from [A, B, h, w, c]
