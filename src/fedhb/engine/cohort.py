"""A cohort in chunks: how many clients go together, in which order, and the sum of their sums."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.toolbox import add
from fedhb.network.vectors import Network

CHUNK_FLOATS = 2**21
"""The most numbers that the weights of a chunk's clients have together.

Beyond a core's cache the gain of batching is lost.
"""


MOST_CLIENTS = 64
"""The most clients in a chunk, however small their network: their batches are in memory at once."""


SUM_FLOATS, SUM_MOST = 2**25, 8
"""The limits of a chunk where the network does not know the client axis.

Such clients share nothing in a chunk but their sums.
"""


@dataclass
class Traffic:
    """Bytes sent to clients and by them."""

    down: int = 0
    up: int = 0


Sums = tuple[Arrays, Traffic]
"""The summed statistics of a chunk or a cohort, and what was sent."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunk_size(network: Network, count: int = MOST_CLIENTS, parts: int = 1) -> int:
    """Return how many of `count` clients make a chunk.

    `parts` cores can then share the work in equal chunks.
    """
    if network.batches_clients:
        most = max(1, min(MOST_CLIENTS, CHUNK_FLOATS // network.num_params))
    else:
        most = max(1, min(SUM_MOST, SUM_FLOATS // network.num_params))
    chunks = -(-count // most)
    chunks = min(count, -(-chunks // parts) * parts)
    return -(-count // chunks)


def deal(sizes: Sequence[int], positions: Sequence[int], chunk: int) -> list[list[int]]:
    """Return the clients at these positions in chunks of nearly equal length, large clients first.

    A chunk's clients are then of like size, and those still active are always the first ones.
    """
    ordered = sorted(positions, key=lambda k: (-sizes[k], k))
    count = -(-len(ordered) // chunk)
    return [
        ordered[j * len(ordered) // count : (j + 1) * len(ordered) // count] for j in range(count)
    ]


def fold(parts: Iterable[Sums]) -> Sums:
    """Return the sum of the chunks' sums, added in their order."""
    total: Arrays | None = None
    traffic = Traffic()
    for summary, sent in parts:
        total = add(total, summary)
        traffic = Traffic(traffic.down + sent.down, traffic.up + sent.up)
    assert total is not None
    return total, traffic
