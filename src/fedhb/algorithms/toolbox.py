"""The tools of several algorithms: starting weights, mixed predictions, sums, averages.

Sums are of differences to what was sent. Differences of similar numbers are exact in their own
type, so a chunk's few terms are added in it; the sums of chunks are added in float64 (`add`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedhb.algorithms.contract import (
    REPORTS,
    Arrays,
    ClientId,
    Kind,
    NumExamples,
    Problem,
    Reported,
    Steps,
    Vector,
)
from fedhb.network.vectors import Weights

SHARED = ("head", "buffers")
"""The vectors that the server averages beside theta, where they are trained or there."""

SHARED_ANSWERS: Mapping[str, Kind] = {**{key: Vector(key) for key in SHARED}, **REPORTS}
"""The declaration of the arrays that most algorithms' clients send beside theta."""

BLOCK_NUMBERS = 2**17
"""Numbers of all clients together that are summed at once: they stay in a core's cache."""


# Starting points ------------------------------------------------------------------------------


def repeat(vector: Tensor, count: int) -> Tensor:
    """Return a fresh [count, k] of a vector [k], or of one vector for each client [count, k]."""
    return vector.expand(count, -1).clone()


def start_weights(problem: Problem, theta: Tensor, received: Arrays, count: int) -> Weights:
    """Return weights of `count` clients at theta.

    A head or buffers that were not sent are those of the initial network.
    """
    network = problem.network
    return Weights(
        repeat(theta, count),
        repeat(received.get("head", network.head), count),
        repeat(received.get("buffers", network.buffers), count),
    )


def shared_parts(problem: Problem, update: str, shortens: bool = False) -> Arrays:
    """Return the head where it is trained, and the buffers of batch norm where there are some.

    `shortens`: whether a prior makes the server's theta shorter than the mean of the answers.
    """
    if shortens and len(problem.network.buffers):
        warnings.warn(
            "the prior (lambda0, shrink) shortens the weights on the server, but the running "
            "statistics of batch norm stay those of longer weights, so predictions become unsure: "
            "use batch_norm=batch, or train without this prior",
            stacklevel=2,
        )
    parts: Arrays = {}
    if update == "full" and len(problem.network.head):
        parts["head"] = problem.network.head.clone()
    if len(problem.network.buffers):
        parts["buffers"] = problem.network.buffers.clone()
    return parts


# Predictions of several networks --------------------------------------------------------------


def mixture_prediction(problem: Problem, weights: Weights, shares: Tensor, x: Tensor) -> Tensor:
    """Return the predictions of M networks (weights [M, ...]) for x [n, ...], mixed by [M, n]."""
    outputs = problem.network.outputs(weights, x.expand(len(weights.theta), *x.shape))
    return problem.likelihood.average(problem.likelihood.predictive(outputs), shares)


def uniform(count: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return equal shares [M, n]."""
    return torch.full((count, len(x)), 1.0 / count, dtype=dtype, device=x.device)


# Sums over clients ----------------------------------------------------------------------------


def blocks(clients: int, size: int) -> Iterator[slice]:
    """Cut the vectors of some clients, each of this size, into blocks that fit a core's cache."""
    width = max(1, BLOCK_NUMBERS // clients)
    return (slice(start, start + width) for start in range(0, size, width))


def differences(
    vectors: Tensor, reference: Tensor, weight: Tensor, squares: Tensor | None = None
) -> Tensor:
    """Return sum_i weight_i (vectors_i - reference): vectors [C, ...], weight [C] -> [...].

    sum_i weight_i (vectors_i - reference)^2 is written to `squares` [...] where it is given.
    """
    rows, flat = vectors.flatten(1), reference.reshape(-1).to(vectors.dtype)
    weight = weight.to(vectors)
    total = torch.empty(reference.shape, dtype=vectors.dtype, device=reference.device)
    for part in blocks(*rows.shape):
        gap = rows[:, part] - flat[part]
        torch.mv(gap.T, weight, out=total.view(-1)[part])
        if squares is not None:
            torch.mv(gap.square_().T, weight, out=squares.view(-1)[part])
    return total


def summarise_shared(answers: Arrays, received: Arrays, weight: Tensor) -> Arrays:
    """Return the sums that every algorithm needs.

    They are the number of clients, their weights and examples, the reports (times examples), and
    the weighted differences of head and buffers.
    """
    examples = answers["examples"].double()
    sums = {
        "count": torch.tensor(float(len(examples)), dtype=torch.float64),
        "weight": weight.double().sum(),
        "examples": examples.sum(),
    }
    for key in ("loss", "score"):
        if key in answers:
            values = answers[key].double()
            sums[key] = (values * examples.to(values.device)).sum()
    if "kl" in answers:
        sums["kl"] = answers["kl"].double().sum()
    for key in SHARED:
        if key in received:
            sums[key] = differences(answers[key], received[key], weight)
    return sums


def average_shared(server: Arrays, summary: Arrays) -> Arrays:
    """Return the averaged head and buffers."""
    return {
        key: step(server[key], summary[key] / summary["weight"]) for key in SHARED if key in summary
    }


def step(reference: Tensor, difference: Tensor) -> Tensor:
    """Return reference + difference, added in float64, in the reference's type."""
    return (reference.double() + difference).to(reference.dtype)


# Sums of chunks, and bytes --------------------------------------------------------------------

ROWS = "rows of"
"""The key of the clients' ids where answers are gathered, a row each, instead of summed."""

SOUND = "sound"
"""The key that says whether all numbers of an answer were finite; if not, they are zeros."""


def add(total: Arrays | None, part: Arrays) -> Arrays:
    """Return the sum of two summaries in float64, in place of the first.

    Gathered answers are put one below the other.
    """
    if ROWS in part:
        if total is None:
            return part
        return {key: torch.cat([total[key], value]) for key, value in part.items()}
    if total is None:
        return {key: value.double() for key, value in part.items()}
    for key, value in part.items():
        total[key] += value
    return total


def num_bytes(arrays: Mapping[str, Tensor]) -> int:
    """Return the bytes of these arrays."""
    return sum(value.numel() * value.element_size() for value in arrays.values())


def answer_bytes(steps: Steps, answers: Arrays) -> int:
    """Return the bytes of these answers, without the few numbers that only records need."""
    uncounted = (Reported, NumExamples, ClientId)
    return num_bytes(
        {k: v for k, v in answers.items() if not isinstance(steps.answer[k], uncounted)}
    )


def received_bytes(steps: Steps, received: Arrays, clients: int) -> int:
    """Return the bytes of what is sent to so many clients."""
    sent = {key: value for key, value in received.items() if key not in steps.known}
    common = {key: value for key, value in sent.items() if key not in steps.each}
    return num_bytes(sent) + (clients - 1) * num_bytes(common)
