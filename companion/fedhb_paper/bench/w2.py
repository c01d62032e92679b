"""W2: rounds of MobileNet by every contender, as in the CIFAR experiments without crops and flips.

A round of 10 clients x 500 images takes minutes on a small machine. By default each client has 100
images, and the seconds are multiplied by five. The costs that a round has only once, such as
averaging, then count five times, for every contender alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from fedhb.engine.cohort import cores
from fedhb_paper.bench.bench_task import Task
from fedhb_paper.bench.peers import PlainProcesses
from fedhb_paper.bench.processes import Tell
from fedhb_paper.bench.side_by_side import side_by_side, table

EXAMPLES = 500
FULL = Task(
    "mobilenet",
    (3, 32, 32),
    num_clients=10,
    examples=EXAMPLES,
    per_round=10,
    momentum=0.9,
    batch_norm="batch",
    num_classes=100,
)
SIZE = replace(FULL, examples=100)
REPEATS = 3


def measure(size: Task, repeats: int, tell: Tell) -> dict[str, Any]:
    """Measure the contenders' wall time for a round of 500 images a client."""
    clients, scale = size.clients(), EXAMPLES / size.examples
    limits = {"handwritten_processes": lambda: PlainProcesses(size, clients, cores())}
    results = side_by_side(size, clients, limits, repeats, tell, settle=False, scale=scale)
    return results | {"measured_examples": size.examples, "scale": scale}


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the contenders."""
    title = (
        f"W2: 10 clients x {EXAMPLES} images, MobileNet (3.3 million), batches of 50, "
        "one epoch of SGD"
    )
    if results["scale"] != 1.0:
        images, scale = results["measured_examples"], results["scale"]
        title += f"\nmeasured with {images} images a client, times {scale:g}"
    return [table(results, title)]
