"""Minibatches of many clients at once: each client gets its own data, in its own order, and nothing
of the others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import CLASSES, PLAN
from hypothesis import given
from hypothesis import strategies as st

from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.seeding import Randomness
from fedhb.training.batches import batches, crop_and_flip

RNG = Randomness(5, 3)


def numbered(sizes):
    """Clients whose examples are numbered: x of client k's n-th example is 1000 k + n."""
    pairs = [
        ((1000.0 * k + np.arange(n)).reshape(-1, 1), np.arange(n) % CLASSES)
        for k, n in enumerate(sizes)
    ]
    return Clients.from_arrays(pairs, num_classes=CLASSES)


def positions(batch, count):
    return torch.arange(count)[batch.active].tolist()


def seen(who, plan, merge_single=False):
    """Return the examples of each client, batch by batch, without padding: lists of (x, y) lists."""
    found = [[] for _ in range(len(who))]
    for batch in batches(who, plan, RNG, merge_single=merge_single):
        active = positions(batch, len(who))
        assert (
            len(active)
            == len(batch.x)
            == len(batch.y)
            == len(batch.counts)
            == len(batch.generators)
        )
        for a, k in enumerate(active):
            n = batch.counts[a]
            found[k].append((batch.x[a, :n, 0].tolist(), batch.y[a, :n].tolist(), batch.last_epoch))
            if batch.valid is None:
                assert n == batch.x.shape[1]
            else:
                assert batch.valid[a].tolist() == [1.0] * n + [0.0] * (batch.x.shape[1] - n)
            assert batch.x.shape[1] == max(batch.counts)
    return found


@given(st.lists(st.integers(1, 23), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 3))
def test_every_example_exactly_once_per_epoch(sizes, width, epochs):
    plan = replace(PLAN, batch_size=width, epochs=epochs)
    for k, (n, found) in enumerate(zip(sizes, seen(numbered(sizes), plan), strict=True)):
        per_epoch = -(-n // width)
        assert len(found) == per_epoch * epochs
        for e in range(epochs):
            epoch = found[e * per_epoch : (e + 1) * per_epoch]
            assert sorted(x for xs, _, _ in epoch for x in xs) == [1000.0 * k + i for i in range(n)]
            assert all(len(xs) == width for xs, _, _ in epoch[:-1])
            assert all(
                y == int(x) % 1000 % CLASSES
                for xs, ys, _ in epoch
                for x, y in zip(xs, ys, strict=True)
            )
            assert {last for _, _, last in epoch} == {e == epochs - 1}


def test_epochs_and_clients_are_shuffled_differently():
    plan = replace(PLAN, batch_size=20, epochs=2)
    first, second = seen(numbered([20, 20]), plan)
    orders = [[x % 1000 for x in xs] for xs, _, _ in (*first, *second)]
    assert len({tuple(o) for o in orders}) == 4 and list(range(20)) not in orders


@given(st.lists(st.integers(1, 23), min_size=2, max_size=5), st.integers(1, 9))
def test_a_clients_batches_do_not_depend_on_the_others(sizes, width):
    plan, who = replace(PLAN, batch_size=width), numbered(sizes)
    together = seen(who, plan)
    assert [seen(who.select([k]), plan)[0] for k in range(len(sizes))] == together
    backwards = list(range(len(sizes)))[::-1]
    assert seen(who.select(backwards), plan) == together[::-1]


@pytest.mark.parametrize(
    ("n", "width", "counts"),
    [
        (9, 4, [4, 5]),
        (8, 4, [4, 4]),
        (10, 4, [4, 4, 2]),
        (5, 4, [5]),
        (4, 4, [4]),
        (2, 4, [2]),
        (13, 4, [4, 4, 5]),
    ],
)
def test_a_last_batch_of_one_joins_the_one_before(n, width, counts):
    plan = replace(PLAN, batch_size=width, epochs=1)
    (found,) = seen(numbered([n]), plan, merge_single=True)
    assert [len(xs) for xs, _, _ in found] == counts
    assert sorted(x for xs, _, _ in found for x in xs) == list(range(n))


def test_batch_norm_never_sees_one_example():
    with pytest.raises(InputError, match=r"client 1 .*example"):
        list(batches(numbered([3, 1]), PLAN, RNG, merge_single=True))
    plan = replace(PLAN, batch_size=1)
    with pytest.raises(InputError, match="batch_size=1"):
        list(batches(numbered([4]), plan, RNG, merge_single=True))


def images(clients_, batch, height=6, width=5, seed=0):
    return torch.randint(
        1, 256, (clients_, batch, 3, height, width), generator=torch.Generator().manual_seed(seed)
    )


def generators(*seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


def explicit(x, generator, padding=4):
    """One client's images, one after another: pad with zeros, cut out, mirror."""
    n, _, height, width = x.shape
    tops = torch.randint(2 * padding + 1, (n,), generator=generator).tolist()
    lefts = torch.randint(2 * padding + 1, (n,), generator=generator).tolist()
    flips = torch.randint(2, (n,), generator=generator).tolist()
    out = torch.empty_like(x)
    for i in range(n):
        canvas = torch.zeros(3, height + 2 * padding, width + 2 * padding, dtype=x.dtype)
        canvas[:, padding : padding + height, padding : padding + width] = x[i]
        cut = canvas[:, tops[i] : tops[i] + height, lefts[i] : lefts[i] + width]
        out[i] = cut.flip(-1) if flips[i] else cut
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_against_the_slow_way(dtype):
    x = images(3, 40).to(dtype)
    found = crop_and_flip(x, generators(1, 2, 3), [40, 40, 40])
    assert found.dtype == dtype and found.shape == x.shape
    for k, generator in enumerate(generators(1, 2, 3)):
        assert torch.equal(found[k], explicit(x[k], generator))


def test_crop_and_flip_is_each_clients_own():
    x = images(2, 6)
    together = crop_and_flip(x, generators(1, 2), [6, 4])
    assert torch.equal(crop_and_flip(x[1:, :4], generators(2), [4])[0], together[1, :4])
    assert torch.equal(crop_and_flip(x, generators(1, 2), [6, 4]), together)
    assert not torch.equal(crop_and_flip(x, generators(1, 3), [6, 4])[1, :4], together[1, :4])


def test_batches_are_augmented_where_the_data_say_so():
    x = images(1, 12)[0].numpy().astype(np.uint8)
    pairs = [(x[:7], np.zeros(7, int)), (x[7:], np.zeros(5, int))]
    plain = Clients.from_arrays(pairs, num_classes=1)
    augmented = replace(plain, augment="crop-flip")
    changed = 0
    for one, other in zip(batches(plain, PLAN, RNG), batches(augmented, PLAN, RNG), strict=False):
        changed += not torch.equal(one.x, other.x)
    assert changed
    together = [b.x[1, : b.counts[1]] for b in batches(augmented, PLAN, RNG) if len(b.x) == 2]
    alone = [b.x[0] for b in batches(augmented.select([1]), PLAN, RNG)]
    assert len(together) == len(alone) == 4
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
