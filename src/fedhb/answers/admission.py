"""The gate that every client's answer passes before it enters a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from fedhb.algorithms.contract import (
    Arrays,
    ClientId,
    Kind,
    NonNegative,
    NumExamples,
    Shares,
    Vector,
)
from fedhb.errors import DivergedError, FailedRoundError, InputError

Declaration = Mapping[str, Kind]


class Refused(Exception):
    """An answer that must not enter a sum, and why. The run goes on without it."""


# Checks of a run in one process: what is wrong there ends the run -----------------------------


def check_personal(weights: Tensor, ids: Sequence[int]) -> None:
    """Refuse personal posteriors [C, M, d], or their predictions [C, ...], with NaN or infinity."""
    client = _first_bad_row(weights)
    if client is not None:
        raise DivergedError(
            f"personalisation of client {ids[client]} diverges: lower the learning rate of "
            "personalisation"
        )


def check_global(prediction: Tensor) -> None:
    """Refuse global predictions [n, ...] with NaN or infinity.

    The server's weights may be finite, and still too large to predict with.
    """
    if _first_bad_row(prediction) is not None:
        raise DivergedError(
            "the global model predicts NaN or infinity: training diverges; lower the learning rate"
        )


def admit(
    answers: Arrays, declaration: Declaration, ids: Sequence[int], round_number: int
) -> Arrays:
    """Return the answers [C, ...] of these clients after a check.

    Every array must be declared, have a row for each client, and be finite.
    """
    for key, value in answers.items():
        if key not in declaration:
            raise InputError(
                f"the algorithm's clients send {key!r}, which its `answer` does not declare: add it"
            )
        if len(value) != len(ids):
            raise FailedRoundError(
                f"round {round_number}: {len(ids)} clients answered, but {key!r} has {len(value)} "
                "rows: the algorithm's local_update must return a row for each client"
            )
        client = _first_bad_row(value)
        if client is not None:
            raise DivergedError(
                f"round {round_number}: client {ids[client]} sent {key!r} with NaN or infinity: "
                "training diverges; lower the learning rate or the momentum"
            )
    return answers


# Checks of an answer that came over a network: what is wrong there is refused -----------------


def check_alike(answer: Arrays, sample: Arrays) -> None:
    """Refuse an answer [1, ...] whose keys, shapes or types are not those of the sample."""
    if answer.keys() != sample.keys():
        raise Refused(f"it holds {sorted(answer)} instead of {sorted(sample)}")
    for key, like in sample.items():
        if answer[key].shape != like.shape:
            raise Refused(
                f"{key!r} has shape {list(answer[key].shape)} instead of {list(like.shape)}"
            )
        if answer[key].dtype != like.dtype:
            raise Refused(f"{key!r} has type {answer[key].dtype} instead of {like.dtype}")


def check_finite(arrays: Arrays) -> None:
    """Refuse an answer, or its sums, with NaN or infinity."""
    for key, value in arrays.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise Refused(f"{key!r} holds NaN or infinity")


def check_values(
    answer: Arrays, declaration: Declaration, client: int, examples: int, most: int
) -> None:
    """Refuse an answer [1, ...] whose numbers are not what they are declared to be.

    Args:
        answer: the arrays of one client.
        declaration: what they are.
        client: the id of the client that was asked.
        examples: the number of examples that this client was counted with.
        most: the examples of all clients together. An answer that counted as more than that, or as
            less than nothing, would leave nothing of the others' answers.
    """
    for key, value in answer.items():
        kind = declaration[key]
        if isinstance(kind, ClientId) and value.flatten().tolist() != [client]:
            raise Refused(f"it says it is client {value.flatten().tolist()}'s")
        if isinstance(kind, NumExamples):
            said = value.flatten().tolist()
            if said != [examples] or not 0 < examples <= most:
                raise Refused(
                    f"it says it is of {', '.join(f'{n:g}' for n in said)} examples, and its "
                    f"client was counted with {examples} of {most}: a node's data must stay as "
                    "they were when it joined"
                )
        if isinstance(kind, Shares | NonNegative) and (value < 0).any():
            raise Refused(f"{key!r} holds negative weights")


class Lengths:
    """A bound on the length of each vector of an answer.

    A vector may be `growth` times as long as the median answer of the round before, and is always
    allowed the length of a vector of ones. The first measure is a sample answer. `Measurements`
    have no bound: most clients send zeros, so an honest answer is longer by any factor.
    """

    def __init__(self, sample: Arrays, declaration: Declaration, growth: float):
        self.growth = growth
        vectors = {key: v for key, v in sample.items() if isinstance(declaration[key], Vector)}
        self.before = {key: _norm(vector) for key, vector in vectors.items()}
        self._this_round: dict[str, list[float]] = {key: [] for key in self.before}

    def check(self, answer: Arrays) -> None:
        """Refuse an answer with a vector that is too long."""
        for key, before in self.before.items():
            length = _norm(answer[key])
            bound = self.growth * max(before, math.sqrt(answer[key].numel()))
            if not length <= bound:
                raise Refused(f"{key!r} has norm {length:.3g}, above the bound {bound:.3g}")

    def note(self, answer: Arrays) -> None:
        """Remember the lengths of an admitted answer's vectors."""
        for key, lengths in self._this_round.items():
            lengths.append(_norm(answer[key]))

    def settle(self) -> None:
        """End the round: its median lengths are the measure for the next one."""
        for key, lengths in self._this_round.items():
            self.before[key] = median(lengths) if lengths else self.before[key]
        self._this_round = {key: [] for key in self.before}


def check_metrics(metrics: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    """Return a client's metrics, which must have these names and be finite numbers."""
    values = {name: metrics.get(name) for name in names}
    if metrics.keys() != set(names) or not all(
        isinstance(v, float) and math.isfinite(v) for v in values.values()
    ):
        raise Refused(f"its metrics are {dict(metrics)}")
    return {name: float(value) for name, value in values.items() if isinstance(value, float)}


def finite_rows(answers: Arrays) -> Tensor:
    """Return whether every number of each client's answer [C, ...] is finite, bool [C]."""
    sound = torch.ones(len(next(iter(answers.values()))), dtype=torch.bool)
    for value in answers.values():
        if value.is_floating_point():
            finite = torch.isfinite(value)
            sound &= (finite.flatten(1).all(1) if value.ndim > 1 else finite).cpu()
    return sound


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def _first_bad_row(values: Tensor) -> int | None:
    """Return the first row of values [C, ...] with NaN or infinity."""
    rows = values.reshape(len(values), -1)
    # one fast pass; a sum of large numbers may overflow, so suspects are looked at again
    suspects = ~torch.isfinite(rows.sum(1))
    for c in suspects.nonzero().flatten().tolist():
        if not torch.isfinite(rows[c]).all():
            return int(c)
    return None
