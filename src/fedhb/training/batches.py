"""Minibatches for C clients at once, each client shuffled and augmented by its own randomness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        held: where each example lies among all that the clients hold, a position in `clients.train.rows` [A, B].
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
        """x as the network takes it, prepared once for all networks with the same scaling (a model and its gate)."""
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
    """Shuffled minibatches of all clients, `plan.epochs` times through each client's data.

    A client out of batches takes no part in the rest of the epoch. With `merge_single` a last batch of one example joins
    the one before it (batch norm cannot train on one example).
    """
    ids, sizes = clients.ids.tolist(), clients.sizes.tolist()
    if merge_single and plan.batch_size == 1:
        raise InputError(
            "batch_size=1, and batch norm cannot train on one example: give at least 2"
        )
    if merge_single:
        refuse_single(clients)
    # the order of the examples is the same for every method, whatever else it draws: dropout, crops, a module's own noise
    orders, generators = [rng(i, "order") for i in ids], [rng(i, "noise") for i in ids]
    device = clients.train.x.device
    width = plan.batch_size
    bounds, offsets = (
        [batch_bounds(n, width, merge_single) for n in sizes],
        clients.train.offsets.tolist(),
    )
    steps = [
        [k for k, b in enumerate(bounds) if s < len(b)] for s in range(max(len(b) for b in bounds))
    ]
    counts = [
        [bounds[k][s][1] - bounds[k][s][0] for k in positions] for s, positions in enumerate(steps)
    ]
    shapes = [(len(c), max(c)) for c in counts]
    valid = [
        None if min(c) == max(c) else torch.arange(max(c)) < torch.tensor(c).unsqueeze(1)
        for c in counts
    ]
    valid = [None if v is None else v.to(torch.float32).to(device) for v in valid]
    active = [slice(0, len(p)) if p == list(range(len(p))) else torch.tensor(p) for p in steps]
    for epoch in range(plan.epochs):
        shuffled = [
            offsets[k] + torch.randperm(n, generator=g)
            for k, (n, g) in enumerate(zip(sizes, orders, strict=True))
        ]
        parts = [
            # padding repeats the first example: any finite input will do, its weight is zero
            torch.cat([p, p[:1].expand(most - len(p))]) if len(p) < most else p
            for s, (positions, (_, most)) in enumerate(zip(steps, shapes, strict=True))
            for p in (shuffled[k][slice(*bounds[k][s])] for k in positions)
        ]
        held = torch.cat(parts)  # of all steps: one transfer to the device, if it is another one
        places, rows = (
            v.to(device).split([a * b for a, b in shapes]) for v in (held, clients.train.rows[held])
        )
        for s, positions in enumerate(steps):
            own = [generators[k] for k in positions]
            # whole rows are copied by index_select; x[rows] would fetch them number by number
            x, y = (
                pool.index_select(0, rows[s]).unflatten(0, shapes[s])
                for pool in (clients.train.x, clients.train.y)
            )
            if clients.augment:
                x = crop_and_flip(x, own, counts[s])
            yield Batch(
                active=active[s],
                x=x,
                y=y,
                held=places[s].view(shapes[s]),
                counts=counts[s],
                valid=valid[s],
                generators=own,
                last_epoch=epoch == plan.epochs - 1,
            )


def batch_bounds(n: int, width: int, merge_single: bool) -> list[tuple[int, int]]:
    """Where the batches of n examples begin and end, in the order that they are shuffled to."""
    starts = list(range(0, n, width))
    if merge_single and n > width and n % width == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))


def crop_and_flip(
    x: Tensor, generators: Sequence[torch.Generator], counts: Sequence[int], padding: int = 4
) -> Tensor:
    """Random crops after padding with zeros, and random horizontal flips, of images x [A, B, c, h, w], drawn per client."""
    most, (height, width) = x.shape[1], x.shape[-2:]
    padded = functional.pad(x, [padding] * 4)
    top, left, flip = torch.zeros(3, len(x), most, dtype=torch.int64)
    for k, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        top[k, :count] = torch.randint(2 * padding + 1, (count,), generator=generator)
        left[k, :count] = torch.randint(2 * padding + 1, (count,), generator=generator)
        flip[k, :count] = torch.randint(2, (count,), generator=generator)
    rows = top.unsqueeze(-1) + torch.arange(height)
    columns = torch.arange(width).expand(len(x), most, width)
    columns = left.unsqueeze(-1) + torch.where(
        flip.bool().unsqueeze(-1), width - 1 - columns, columns
    )
    client = torch.arange(len(x)).view(-1, 1, 1, 1)
    example = torch.arange(most).view(1, -1, 1, 1)
    moved = padded.movedim(2, -1)[
        client, example, rows.unsqueeze(-1), columns.unsqueeze(-2)
    ]  # [A, B, h, w, c]
    return moved.movedim(-1, 2)
