"""W1: rounds of a small network by every contender, and of each of fedhb's algorithms."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedhb.algorithms import ALGORITHMS
from fedhb.engine.cohort import cores
from fedhb.processes import can_fork
from fedhb_paper.bench.bench_task import Task
from fedhb_paper.bench.measure import alternate, over
from fedhb_paper.bench.ours import Ours
from fedhb_paper.bench.peers import Handwritten
from fedhb_paper.bench.processes import Tell, apart
from fedhb_paper.bench.side_by_side import side_by_side, table

SIZE = Task("mlp", (784,), num_clients=100, examples=600, per_round=10, options={"hidden": 256})
REPEATS = 15


def measure(size: Task, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure the contenders' wall time, and the processor time of every algorithm.

    `algorithms` has each algorithm's time on one thread, and its ratio to FedBABU's.
    """
    # first: the contenders will use a second thread
    algorithms = apart(
        every_algorithm,
        size,
        repeats,
        tell=lambda share, text: tell(0.5 * share, f"every algorithm: {text}"),
    )
    clients = size.clients()
    limits = {"handwritten_threads": lambda: Handwritten(size, clients, threads=cores())}
    if can_fork() and cores() > 1:
        limits["handwritten_processes"] = lambda: Handwritten(size, clients, processes=cores())

    def tell_rest(share: float, text: str) -> None:
        tell(0.5 + 0.5 * share, text)

    results = side_by_side(size, clients, limits, repeats, tell_rest, settle=True)
    return results | {"algorithms": algorithms}


def every_algorithm(size: Task, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure a round of each registered algorithm, in one process on one thread.

    The time is processor time, which does not depend on the other load of the machine.
    """
    clients = size.clients()
    with warnings.catch_warnings():
        # known: its distillation is not in the table
        warnings.filterwarnings("ignore", message="fedbe has no server inputs")
        rounds = {name: Ours(name, size, clients, alone=True) for name in ALGORITHMS}
    seconds = alternate(rounds, repeats, tell, clock=time.process_time)
    return {
        name: {"seconds": statistics.median(times), **over(seconds, name, "fedbabu")}
        for name, times in seconds.items()
    }


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the contenders and of every algorithm."""
    title = (
        "W1: 100 clients x 600 examples, 10 in a round, MLP 784-256-10, batches of 50, "
        "one epoch of SGD"
    )
    every = Table("algorithm", title="W1: a round of every algorithm, processor time of one thread")
    for header in ("seconds", "ratio to FedBABU", "quartiles"):
        every.add_column(header, justify="right")
    for name, row in results["algorithms"].items():
        low, high = row["quartiles"]
        every.add_row(
            name, f"{row['seconds']:.4f}", f"{row['ratio']:.2f}", f"{low:.2f} .. {high:.2f}"
        )
    return [table(results, title), every]
