"""Additive statistics: what every algorithm sums over clients, and how bytes are counted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedhb.algorithms.base import Arrays, Problem


def shared_parts(problem: Problem, update: str) -> Arrays:
    """What the server averages beside theta: the head where it is trained, and the buffers of batch norm."""
    parts: Arrays = {}
    if update == "full" and len(problem.network.head):
        parts["head"] = problem.network.head.clone()
    if len(problem.network.buffers):
        parts["buffers"] = problem.network.buffers.clone()
    return parts


SHARED = ("head", "buffers")
REPORTS = ("loss", "score", "kl")
"""What clients report beside their vectors: mean loss and score on their own data, and the KL term of their objective."""


def differences(found: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i (found_i - reference) in float64, one client at a time: found [C, ...], weight [C] -> [...]."""
    reference = reference.double()
    total = torch.zeros_like(reference)
    for row, w in zip(found, weight.tolist(), strict=True):
        total.add_(row - reference, alpha=w)  # in float64, for row of any type, and row stays as it is
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
            sums[key] = (found[key].double() * (1.0 if key == "kl" else examples)).sum()
    for key in SHARED:
        if key in received:
            sums[key] = differences(found[key], received[key], weight)
    return sums


def average_shared(server: Arrays, summary: Arrays) -> Arrays:
    """The averaged head and buffers."""
    return {key: step(server[key], summary[key] / summary["weight"]) for key in SHARED if key in summary}


def step(reference: Tensor, difference: Tensor) -> Tensor:
    """reference + difference, added in float64 and kept in the reference's type."""
    return (reference.double() + difference).to(reference.dtype)


def add(total: Arrays | None, part: Arrays) -> Arrays:
    """The sum of two summaries."""
    return dict(part) if total is None else {key: total[key] + part[key] for key in part}


def num_bytes(arrays: Mapping[str, Tensor]) -> int:
    """The bytes of the vectors that are sent.

    The few numbers reported beside them (loss, KL, examples) are not counted, nor a client's group, which the server knows.
    """
    return sum(a.numel() * a.element_size() for key, a in arrays.items() if key not in (*REPORTS, "examples", "group"))
