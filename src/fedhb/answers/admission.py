"""The one gate that every client's answer passes before it enters a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays
from fedhb.errors import DivergedError, FailedRoundError

NUMBERS = "curvature"
"""Few numbers for each client [n, k], no vector of weights: none negative, zeros where it has not measured."""

DRAWN = ("pi", "g")
"""Weights beside the number of examples: FedEM's shares of learners, and what FedBE's clients draw."""


class Refused(Exception):
    """An answer that must not enter a sum, and why. The run goes on without it."""


def check_personal(weights: Tensor, ids: Sequence[int]) -> None:
    """Refuse personal posteriors [C, M, d], or what they predict [C, ...], that are not finite."""
    client = _not_finite(weights)
    if client is not None:
        raise DivergedError(
            f"personalisation of client {ids[client]} diverges: lower the learning rate of personalisation"
        )


def check_global(prediction: Tensor) -> None:
    """Refuse global predictions [n, ...] that are not finite: the server's weights may be, and too large to predict with."""
    if _not_finite(prediction) is not None:
        raise DivergedError(
            "the global model predicts NaN or infinity: training diverges; lower the learning rate"
        )


def admit(found: Arrays, ids: Sequence[int], round_number: int) -> Arrays:
    """The answers [C, ...] of these clients, after a check that each has its own row and every number is finite."""
    for key, value in found.items():
        if len(value) != len(ids):
            raise FailedRoundError(
                f"round {round_number}: {len(ids)} clients answered, but {key!r} has {len(value)} rows"
            )
        client = _not_finite(value)
        if client is not None:
            raise DivergedError(
                f"round {round_number}: client {ids[client]} sent {key!r} with NaN or infinity: training diverges; "
                "lower the learning rate or the momentum"
            )
    return found


def check_alike(found: Arrays, sample: Arrays) -> None:
    """Refuse an answer [1, ...] whose keys, shapes or types are not those of the sample."""
    if found.keys() != sample.keys():
        raise Refused(f"it holds {sorted(found)} instead of {sorted(sample)}")
    for key, like in sample.items():
        if found[key].shape != like.shape:
            raise Refused(
                f"{key!r} has shape {list(found[key].shape)} instead of {list(like.shape)}"
            )
        if found[key].dtype != like.dtype:
            raise Refused(f"{key!r} has type {found[key].dtype} instead of {like.dtype}")


def check_finite(found: Arrays) -> None:
    """Refuse an answer, or its sums, with a NaN or an infinity."""
    for key, value in found.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise Refused(f"{key!r} holds NaN or infinity")


def check_owner(found: Arrays, client: int) -> None:
    """Refuse an answer that says it is another client's."""
    if "client" in found and found["client"].flatten().tolist() != [client]:
        raise Refused(f"it says it is client {found['client'].flatten().tolist()}'s")


def check_weights(found: Arrays, known: int, most: int) -> None:
    """Refuse an answer [1, ...] that would weigh other than it may in the sums.

    Its number of examples is the one that the client was counted with (`known`), and at most what all had together (`most`): of a
    negative one, or one out of proportion, nothing is left of the others' answers. Weights that clients draw are not negative.
    """
    if "examples" in found:
        said = found["examples"].flatten().tolist()
        if said != [known] or not 0 < known <= most:
            raise Refused(
                f"it says it is of {', '.join(f'{n:g}' for n in said)} examples, and its client was counted with {known} of "
                f"{most}: a node's data must stay as they were when it joined"
            )
    for key in DRAWN:
        if key in found and (found[key] < 0).any():
            raise Refused(f"{key!r} holds negative weights")


class Lengths:
    """How long the vectors of an answer may be: `growth` times what they were in the round before, and never under the length of
    a vector of ones. The first measure is a sample answer. Few numbers (fewer than `least`) are no vector of weights, nor are
    those that only some clients measure in a round: an honest one would be longer by any factor."""

    def __init__(self, sample: Arrays, growth: float, least: int):
        self.growth = growth
        vectors = {
            key: v
            for key, v in sample.items()
            if v.is_floating_point() and v.numel() >= least and key != NUMBERS
        }
        self.before = {key: _norm(v) for key, v in vectors.items()}
        self._seen: dict[str, list[float]] = {key: [] for key in self.before}

    def check(self, found: Arrays) -> None:
        """Refuse an answer with a vector that is absurdly long."""
        for key, before in self.before.items():
            length, bound = (
                _norm(found[key]),
                self.growth * max(before, math.sqrt(found[key].numel())),
            )
            if not length <= bound:
                raise Refused(f"{key!r} has norm {length:.3g}, above the bound {bound:.3g}")

    def note(self, found: Arrays) -> None:
        """Remember how long an admitted answer's vectors are."""
        for key, lengths in self._seen.items():
            lengths.append(_norm(found[key]))

    def settle(self) -> None:
        """The round is done: half of its answers were no longer than what is the measure from now on."""
        for key, lengths in self._seen.items():
            self.before[key] = median(lengths) if lengths else self.before[key]
        self._seen = {key: [] for key in self.before}


def check_metrics(metrics: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    """A client's metrics, which must have these names and be finite numbers."""
    values = {name: metrics.get(name) for name in names}
    if metrics.keys() != set(names) or not all(
        isinstance(v, float) and math.isfinite(v) for v in values.values()
    ):
        raise Refused(f"its metrics are {dict(metrics)}")
    return {name: float(value) for name, value in values.items() if isinstance(value, float)}


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def finite_rows(found: Arrays) -> Tensor:
    """Whether every number of each client's answer [C, ...] is finite, bool [C]."""
    sound = torch.ones(len(next(iter(found.values()))), dtype=torch.bool)
    for value in found.values():
        if value.is_floating_point():
            sound &= (
                torch.isfinite(value).flatten(1).all(1).cpu()
                if value.ndim > 1
                else torch.isfinite(value).cpu()
            )
    return sound


def _not_finite(values: Tensor) -> int | None:
    """The first row of values [C, ...] with a NaN or an infinity."""
    rows = values.reshape(len(values), -1)
    suspects = ~torch.isfinite(
        rows.sum(1)
    )  # one fast pass; large numbers may overflow their sum, so look again
    for c in suspects.nonzero().flatten().tolist():
        if not torch.isfinite(rows[c]).all():
            return int(c)
    return None
