"""W3: the server's update at 3.3 million parameters, for 10 to 1,000 clients in a round.

Uploads are made one chunk at a time, outside the clock, as they would arrive. The timed part is all
that the server does, on one thread: admission (`fedhb.answers.admission`), the algorithm's sums,
their addition, and `aggregate`. It is compared with `one pass`: the time to read the uploads once
from memory at the bandwidth measured on one thread. The peak of memory is what the update needs
beside the server's own arrays and the upload at hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from fedhb.algorithms import build
from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.toolbox import add, num_bytes
from fedhb.answers.admission import admit
from fedhb.engine.cohort import chunk_size
from fedhb.seeding import Randomness
from fedhb_paper.bench import machine
from fedhb_paper.bench.bench_task import SEED, Task
from fedhb_paper.bench.memory_use import PeakMemory, own_processes
from fedhb_paper.bench.processes import Tell, apart

NAMES = ("fedavg", "niw", "mixture")


@dataclass(frozen=True)
class Size:
    """The network's width, and the numbers of clients in a round."""

    width: float = 1.0
    counts: tuple[int, ...] = (10, 100, 1000)


SIZE = Size()
REPEATS = 5


def measure(size: Size, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure seconds and memory by algorithm and number of clients.

    `ratio` is the time of one pass over the seconds.
    """
    tell(0.0, "memory bandwidth")
    bandwidth = machine.bandwidth_bytes(1)
    results: dict[str, Any] = {
        "bandwidth_bytes": bandwidth,
        "ratio": {},
        "spread": {},
        "peak_bytes": {},
        "upload_bytes": {},
    }
    cases = [(name, count) for name in NAMES for count in size.counts]
    for position, (name, count) in enumerate(cases):
        tell(position / len(cases), f"{name}, {count} clients")
        times = max(1, min(repeats, 300 // count))  # a pass over many clients is a mean already
        case = apart(one_case, name, size.width, count, times)
        one_pass = case["upload_bytes"] * count / bandwidth
        key, middle = str(count), statistics.median(case["seconds"])
        results.setdefault(name, {})[key] = middle
        results["ratio"].setdefault(name, {})[key] = one_pass / middle
        results["spread"].setdefault(name, {})[key] = [
            one_pass / max(case["seconds"]),
            one_pass / min(case["seconds"]),
        ]
        results["peak_bytes"].setdefault(name, {})[key] = case["peak_bytes"]
        results["upload_bytes"][name] = case["upload_bytes"]
        results["num_params"] = case["num_params"]
    return results


def one_case(name: str, width: float, count: int, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure one algorithm with `count` clients in a round."""
    task = Task(
        "mobilenet",
        (3, 32, 32),
        num_clients=2,
        examples=2,
        per_round=1,
        num_classes=100,
        options={"width": width},
    )
    clients = task.clients()
    problem, algorithm, rng = task.problem(clients), build(name), Randomness(SEED, 1)
    server = algorithm.start(problem, rng)
    received = algorithm.broadcast(server, [0])
    sample, _ = algorithm.local_update(
        problem, received, clients.select([0]), {}, task.plan(algorithm.update), rng
    )
    chunk = chunk_size(problem.network)
    uploads = upload_maker(sample, chunk)

    def update(clients_in_round: int) -> float:
        total: Arrays | None = None
        spent = 0.0
        for start in range(0, clients_in_round, chunk):
            answers = uploads(start, min(chunk, clients_in_round - start))
            started = time.perf_counter()
            admit(answers, algorithm.answer, range(len(answers["examples"])), rng.round)
            total = add(total, algorithm.summarise(problem, received, answers, rng))
            spent += time.perf_counter() - started
        assert total is not None
        started = time.perf_counter()
        algorithm.aggregate(problem, server, total, rng)
        return spent + time.perf_counter() - started

    update(min(count, 3))  # warm-up
    peak = PeakMemory(own_processes())
    seconds = [update(count) for _ in range(repeats)]
    return {
        "seconds": seconds,
        "peak_bytes": peak.rise(),
        "upload_bytes": num_bytes(sample),
        "num_params": problem.network.num_params,
    }


def upload_maker(sample: Arrays, chunk: int) -> Callable[[int, int], Arrays]:
    """Return `make(i, n)`: the answers of n <= chunk clients from number i on.

    They are `sample` [1, ...] plus noise; the next call overwrites them.
    """
    longest = max(value.numel() for value in sample.values())
    noise = torch.from_numpy(
        np.random.default_rng(SEED).standard_normal(2 * longest, dtype=np.float32)
    ).mul_(0.01)
    buffers = {key: value.expand(chunk, *value.shape[1:]).clone() for key, value in sample.items()}

    def make(first: int, count: int) -> Arrays:
        for key, buffer in buffers.items():
            if buffer[0].numel() > 1:
                for k, row in enumerate(buffer[:count]):
                    # another stretch of the same noise for every client
                    start = (first + k) * 7919 % longest
                    torch.add(sample[key][0], _like(noise[start:], row), out=row)
        return {key: buffer[:count] for key, buffer in buffers.items()}

    return make


def _like(numbers: Tensor, row: Tensor) -> Tensor:
    return numbers[: row.numel()].view(row.shape)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of algorithms and numbers of clients."""
    title = (
        f"W3: the server's update, {results['num_params']:,} parameters in the body, "
        "one thread, "
        f"memory read at {results['bandwidth_bytes'] / 1e9:.1f} GB/s"
    )
    shown = Table("algorithm", title=title)
    for header in (
        "clients",
        "seconds",
        "ms a client",
        "one pass",
        "seconds / one pass",
        "peak memory, MB",
    ):
        shown.add_column(header, justify="right")
    for name in NAMES:
        for key, seconds in results[name].items():
            count, ratio, peak = (
                int(key),
                results["ratio"][name][key],
                results["peak_bytes"][name][key],
            )
            memory = "" if peak is None else f"{peak / 1e6:.0f}"
            shown.add_row(
                name,
                key,
                f"{seconds:.4f}",
                f"{1e3 * seconds / count:.2f}",
                f"{ratio * seconds:.4f}",
                f"{1 / ratio:.2f}",
                memory,
            )
    return [shown]
