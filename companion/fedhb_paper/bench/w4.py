"""W4: a large population, of which 100 clients take part in a round of a small network.

A round should cost the same whether a thousand clients exist or a million. Clients share one pool
of examples; a client is a list of row numbers. Each population is measured in a process of its
own: seconds to build it, memory at rest (all processes of the engine, shared pages once), then
seconds of a round and the rise of memory in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table

from fedhb.clients.clients import Clients, Share
from fedhb_paper.bench.bench_task import SEED, Task
from fedhb_paper.bench.measure import quartiles
from fedhb_paper.bench.memory_use import PeakMemory, own_processes, resident_bytes
from fedhb_paper.bench.ours import Ours
from fedhb_paper.bench.processes import Tell, apart

NAMES = ("fedavg", "niw")


@dataclass(frozen=True)
class Size:
    """The populations, clients in a round, examples of a client, and examples in the pool."""

    populations: tuple[int, ...] = (1_000, 30_000, 1_000_000)
    per_round: int = 100
    examples: int = 20
    pool: int = 100_000
    features: int = 32


SIZE = Size()
REPEATS = 15


def measure(size: Size, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure seconds and memory by algorithm and population.

    `ratio` is the seconds of the smallest population over these.
    """
    results: dict[str, Any] = {
        "ratio": {},
        "spread": {},
        "build_seconds": {},
        "resident_bytes": {},
        "round_bytes": {},
    }
    cases = [(name, population) for name in NAMES for population in size.populations]
    for position, (name, population) in enumerate(cases):
        tell(position / len(cases), f"{name}, {population:,} clients")
        case, key = apart(one_case, name, size, population, repeats), str(population)
        middle = statistics.median(case["seconds"])
        results.setdefault(name, {})[key] = middle
        smallest = results[name][str(size.populations[0])]
        results["ratio"].setdefault(name, {})[key] = smallest / middle
        results["spread"].setdefault(name, {})[key] = [
            smallest / q for q in reversed(quartiles(case["seconds"]))
        ]
        for quantity in ("build_seconds", "resident_bytes", "round_bytes"):
            results[quantity].setdefault(name, {})[key] = case[quantity]
    return results | {
        "per_round": size.per_round,
        "examples": size.examples,
        "features": size.features,
    }


def make_clients(size: Size, population: int) -> Clients:
    """Return clients with `examples` rows each of one pool, in a fixed scattered order."""
    rng = np.random.default_rng(SEED)
    x = torch.from_numpy(rng.random((size.pool, size.features), dtype=np.float32) * 2 - 1)
    rows = torch.arange(population * size.examples).mul_(7919).remainder_(size.pool)
    offsets = torch.arange(population + 1) * size.examples
    share = Share(x, torch.from_numpy(rng.integers(0, 10, size.pool)), rows, offsets)
    return Clients(torch.arange(population), share, num_classes=10)


def one_case(name: str, size: Size, population: int, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure one algorithm on one population."""
    started = time.perf_counter()
    clients = make_clients(size, population)
    shape, batch = (size.features,), min(10, size.examples)
    task = Task(
        "mlp", shape, population, size.examples, size.per_round, batch, options={"hidden": 32}
    )
    ours = Ours(name, task, clients)
    built = time.perf_counter() - started
    try:
        for _ in range(3):  # warm-up
            ours()
        resting = resident_bytes(own_processes())
        peak, seconds = PeakMemory(own_processes()), []
        for _ in range(repeats):
            started = time.perf_counter()
            ours()
            seconds.append(time.perf_counter() - started)
        return {
            "seconds": seconds,
            "build_seconds": built,
            "resident_bytes": resting,
            "round_bytes": peak.rise(),
        }
    finally:
        ours.close()


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of algorithms and populations."""
    title = (
        f"W4: {results['per_round']} clients in a round x {results['examples']} examples, "
        f"MLP {results['features']}-32-10"
    )
    shown = Table("algorithm", title=title)
    for header in (
        "clients",
        "seconds a round",
        "ratio",
        "quartiles",
        "build, s",
        "memory at rest, MB",
        "rise in a round, MB",
    ):
        shown.add_column(header, justify="right")
    for name in NAMES:
        for key, seconds in results[name].items():
            low, high = results["spread"][name][key]
            memory = [results[part][name][key] for part in ("resident_bytes", "round_bytes")]
            shown.add_row(
                name,
                f"{int(key):,}",
                f"{seconds:.4f}",
                f"{results['ratio'][name][key]:.2f}",
                f"{low:.2f} .. {high:.2f}",
                f"{results['build_seconds'][name][key]:.2f}",
                *("" if value is None else f"{value / 1e6:.1f}" for value in memory),
            )
    return [shown]
