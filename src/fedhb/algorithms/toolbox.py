"""Additive statistics: what every algorithm sums over clients, and how bytes are counted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.network.vectors import Weights


def shared_parts(problem: Problem, update: str, shortens: bool = False) -> Arrays:
    """What the server averages beside theta: the head where it is trained, and the buffers of batch norm.

    `shortens`: whether a prior makes the server's theta shorter than the mean of what clients found.
    """
    if shortens and len(problem.network.buffers):
        warnings.warn(
            "the prior (niw.lambda0, mixture.shrink) shortens weights on the server, but batch norm's running statistics stay "
            "those of longer ones, and predictions get unsure: use batch_norm=batch, or go without it",
            stacklevel=2,
        )
    parts: Arrays = {}
    if update == "full" and len(problem.network.head):
        parts["head"] = problem.network.head.clone()
    if len(problem.network.buffers):
        parts["buffers"] = problem.network.buffers.clone()
    return parts


SHARED = ("head", "buffers")
REPORTS = ("loss", "score", "kl")
"""What clients report beside their vectors: mean loss and score on their own data, and the KL term of their objective."""


BLOCK = 2**17
"""Numbers of all clients together that are summed at once: what lies between them and their sums then stays in a core's cache."""


def blocks(clients: int, size: int) -> Iterator[slice]:
    """The vectors of some clients, each of this size, cut."""
    width = max(1, BLOCK // clients)
    return (slice(start, start + width) for start in range(0, size, width))


def differences(
    found: Tensor, reference: Tensor, weight: Tensor, squares: Tensor | None = None
) -> Tensor:
    """sum_i weight_i (found_i - reference): found [C, ...], weight [C] -> [...].

    sum_i weight_i (found_i - reference)^2 is written to `squares` [...], where given. Differences of like numbers are exact in
    their own type, and a chunk's few terms are added in it; `add` adds chunks in float64.
    """
    rows, flat, weight = found.flatten(1), reference.reshape(-1).to(found.dtype), weight.to(found)
    total = torch.empty(reference.shape, dtype=found.dtype, device=reference.device)
    for part in blocks(*rows.shape):
        gap = rows[:, part] - flat[part]
        torch.mv(gap.T, weight, out=total.view(-1)[part])
        if squares is not None:
            torch.mv(gap.square_().T, weight, out=squares.view(-1)[part])
    return total


def summarise_shared(found: Arrays, received: Arrays, weight: Tensor) -> Arrays:
    """Sums every algorithm needs: count, weight, reports times examples, and weighted differences of head and buffers."""
    examples = found["examples"].double()
    sums = {
        "count": torch.tensor(float(len(examples)), dtype=torch.float64),
        "weight": weight.double().sum(),
        "examples": examples.sum(),
    }
    for key in REPORTS:
        if key in found:
            sums[key] = (
                found[key].double() * (1.0 if key == "kl" else examples.to(found[key].device))
            ).sum()
    for key in SHARED:
        if key in received:
            sums[key] = differences(found[key], received[key], weight)
    return sums


def average_shared(server: Arrays, summary: Arrays) -> Arrays:
    """The averaged head and buffers."""
    return {
        key: step(server[key], summary[key] / summary["weight"]) for key in SHARED if key in summary
    }


def step(reference: Tensor, difference: Tensor) -> Tensor:
    """reference + difference, added in float64 and kept in the reference's type."""
    return (reference.double() + difference).to(reference.dtype)


ROWS = "rows of"
"""The key of the clients' ids where answers are gathered, one row each, instead of summed."""

SOUND = "sound"
"""The key under which an answer says whether all of its numbers were finite; if not, zeros came in their place."""


def add(total: Arrays | None, part: Arrays) -> Arrays:
    """The sum of two summaries in float64, in place of the first; answers that are gathered are put one below the other."""
    if ROWS in part:
        return (
            part
            if total is None
            else {key: torch.cat([total[key], value]) for key, value in part.items()}
        )
    if total is None:
        return {key: value.double() for key, value in part.items()}
    for key, value in part.items():
        total[key] += value
    return total


def num_bytes(arrays: Mapping[str, Tensor]) -> int:
    """The bytes of the vectors that are sent.

    The few numbers reported beside them (loss, KL, examples) are not counted, nor a client's group and id, which the
    server knows.
    """
    uncounted = (*REPORTS, "examples", "group", ROWS, SOUND)
    return sum(a.numel() * a.element_size() for key, a in arrays.items() if key not in uncounted)


def mixture_prediction(problem: Problem, weights: Weights, shares: Tensor, x: Tensor) -> Tensor:
    """The predictions of M networks (weights [M, ...]) for x [n, ...], mixed with shares [M, n]."""
    outputs = problem.network.outputs(weights, x.expand(len(weights.theta), *x.shape))
    return problem.likelihood.average(problem.likelihood.predictive(outputs), shares)


def uniform(count: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Equal shares [M, n]."""
    return torch.full((count, len(x)), 1.0 / count, dtype=dtype, device=x.device)


def repeat(vector: Tensor, count: int) -> Tensor:
    """A vector [k], or one for each client [count, k], as the start of `count` clients: a fresh [count, k]."""
    return vector.expand(count, -1).clone()


def start_weights(problem: Problem, theta: Tensor, received: Arrays, count: int) -> Weights:
    """Weights of `count` clients at the received point; a head or buffers that were not sent are the initial ones."""
    network = problem.network
    return Weights(
        repeat(theta, count),
        repeat(received.get("head", network.head), count),
        repeat(received.get("buffers", network.buffers), count),
    )
