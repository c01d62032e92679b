"""Small data sets to deal out, and what every partition of them must be."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fedhb.data import Dataset, Examples


def dataset(train, test, num_classes=None, **clients) -> Dataset:
    train, test = np.asarray(train), np.asarray(test)
    x, x_test = (np.zeros((len(y), 2), np.uint8) for y in (train, test))
    return Dataset(
        "toy",
        Examples(x, train, clients.get("held_by")),
        Examples(x_test, test, clients.get("test_by")),
        num_classes,
    )


def counts(rows, labels, classes) -> np.ndarray:
    """Examples per client and class [N, C]."""
    return np.stack([np.bincount(labels[held], minlength=classes) for held in rows])


def assert_partition(rows, n) -> None:
    """Disjoint, covering, ascending within a client."""
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(n))
    for held in rows:
        assert held.dtype == np.int64 and (np.diff(held) > 0).all()


def same(a, b) -> bool:
    return all(
        np.array_equal(p, q)
        for first, second in zip(a, b, strict=True)
        for p, q in zip(first, second, strict=True)
    )


labels_strategy = st.lists(st.integers(0, 6), min_size=12, max_size=150).map(np.array)


def grouped(images=200, classes=5, known=3, novel=2, seed=0) -> Dataset:
    """Every image once in each group; x tells group and image."""
    labels = np.random.default_rng(seed).permutation(np.arange(images) % classes)
    count = known + novel
    group, original = np.arange(count).repeat(images), np.tile(np.arange(images), count)
    x = np.stack([group, original], axis=1).astype(np.uint8)
    train = Examples(x, np.tile(labels, count), group=group, original=original)
    names = tuple(f"kind{g}" for g in range(count))
    return Dataset(
        "toy", train, Examples(x[:0], labels[:0]), classes, groups=names, num_novel=novel
    )


def held(share, k):
    x, y = share.examples(k)
    return set(x[:, 0].tolist()), set(x[:, 1].tolist()), y
