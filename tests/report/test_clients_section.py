"""The map of clients."""

from __future__ import annotations

import tracemalloc

import numpy as np

from fedhb.report import clients_section


def test_the_map_finds_groups():
    centres = np.random.default_rng(0).normal(size=(3, 64)) * 10
    labels = [k % 3 for k in range(30)]
    place, share = clients_section.principal(
        np.array([centres[k] for k in labels]) + np.random.default_rng(1).normal(size=(30, 64))
    )
    assert clients_section.neighbours(place, labels) == 1.0 and share > 0.8


def test_neighbours_of_many_clients_need_little_memory():
    rng = np.random.default_rng(0)
    place, labels = rng.normal(size=(3000, 2)), rng.integers(0, 3, 3000).tolist()
    place[1] = place[0]  # two in one place are each other's neighbours, not their own
    labels[0], labels[1] = 0, 1
    few = ((place[:600, None] - place[None, :600]) ** 2).sum(-1)
    np.fill_diagonal(few, np.inf)
    assert clients_section.neighbours(place[:600], labels[:600]) == np.mean(
        [labels[k] == labels[n] for k, n in enumerate(few.argmin(1))]
    )
    tracemalloc.start()
    clients_section.neighbours(place, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # all distances at once: 216 MB
