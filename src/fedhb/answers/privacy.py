"""Differential privacy at the level of clients: a round's release hardly depends on any one client.

A client's whole contribution to the sums, in differences to what it received, is one vector. It is
clipped to a length S. The sums get Gaussian noise of deviation `noise` S in every coordinate.
Whatever is divided by is a constant: clients count alike, and the count is the cohort's size
however many answered. Losses and scores are not released.

The algorithm declares its `release`: S for a clip C, which sums are withheld, and whether a
client's vectors are clipped to C before they are summarised. For the printed NIW the differences
d = m_i - m0 are clipped to C before they are squared, and its sums (d, d^2) are then no longer than
S = sqrt(C^2 + C^4). The contribution is cut to S in any case.

Neighbours are federations that differ in one client (replaced by any other), so the sums differ by
at most 2 S. Cohorts are drawn without replacement; the Renyi accountant of dp-accounting composes
the rounds (Wang, Balle, Kasiviswanathan 2019, for the sampling).

Noise and cohorts come from a secret key by SHAKE-256. A generator for simulations is not enough:
torch's has 32 bits of seed, and whoever sees two successive models can try them all. The run's
seed is not enough for cohorts either: sampling makes epsilon smaller only where nobody knows who
was sampled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from fedhb.algorithms import ALGORITHMS
from fedhb.algorithms.contract import (
    Algorithm,
    Arrays,
    NumExamples,
    Problem,
    Release,
    Reported,
    Vector,
    declared_release,
)
from fedhb.algorithms.toolbox import add
from fedhb.errors import InputError
from fedhb.seeding import Randomness, absorb

FIXED = ("count", "weight", "examples")
"""Sums that are the cohort's size where every client counts alike."""


@dataclass(frozen=True)
class Mechanism:
    """The mechanism of a private run.

    Attributes:
        noise: the noise's deviation, in units of the longest contribution S.
        clip: C, from which S follows.
        delta: the probability with which epsilon may be exceeded.
        num_clients: N, from whom cohorts are drawn.
        cohort: the number of clients of a round.
        key: the secret that noise and cohorts are drawn from. It lets its reader take the noise
            away. It is kept with the run, so that a resumed run draws the same.
    """

    noise: float
    clip: float
    delta: float
    num_clients: int
    cohort: int
    key: bytes = field(repr=False, compare=False, default=b"")

    @property
    def mark(self) -> str:
        """Return a hash of the key, which tells keys apart without revealing them."""
        return hashlib.sha256(b"which key of noise and cohorts: " + self.key).hexdigest()

    def words(self, purpose: str, count: int) -> np.ndarray:
        """Return `count` random numbers of 64 bits for a purpose.

        They depend on the key and the purpose alone. Nobody can foretell them without the key.
        """
        digest = hashlib.shake_256(self.key + purpose.encode()).digest(8 * count)
        return np.frombuffer(digest, dtype="<u8")

    def normal(self, purpose: str, shape: Sequence[int]) -> torch.Tensor:
        """Return standard normal numbers in float64, by Box and Muller's method.

        Uniform u and v give sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v).
        """
        count = math.prod(shape)
        half = -(-count // 2)
        u, v = (self.words(purpose, 2 * half) >> np.uint64(11)).reshape(2, half) * 2.0**-53
        length, angle = np.sqrt(-2.0 * np.log1p(-u)), 2.0 * np.pi * v
        both = np.concatenate([length * np.cos(angle), length * np.sin(angle)])
        return torch.from_numpy(both[:count]).reshape(tuple(shape))

    def draw(self, round_number: int) -> list[int]:
        """Draw the positions of a round's clients, without replacement, in ascending order."""
        order = np.argsort(self.words(f"cohort {round_number}", self.num_clients))
        return sorted(order[: self.cohort].tolist())

    def epsilon(self, rounds: int) -> float:
        """Return what so many rounds cost, at `delta`."""
        return epsilon_of([(self, rounds)])

    def record(self, epsilon: float) -> dict[str, Any]:
        """Return what result.json holds, of a run that has cost so much."""
        return {
            "epsilon": epsilon,
            "delta": self.delta,
            "noise": self.noise,
            "clip": self.clip,
            "neighbours": "one client replaced",
            "sampling": f"{self.cohort} of {self.num_clients} clients a round, without "
            "replacement, in secret",
            "protects": "the data behind the weights; not the scaling of inputs and targets, nor "
            "the numbers of an evaluation",
        }


def epsilon_of(spent: Sequence[tuple[Mechanism, int]]) -> float:
    """Return the privacy loss of several mechanisms, each used so many times.

    By the Renyi accountant of dp-accounting, divergences add up.
    """
    parts = [(one_round(p.noise, p.num_clients, p.cohort), times) for p, times in spent]
    from dp_accounting import rdp

    orders = parts[0][0][0]
    divergences = sum(times * divergence for (_, divergence), times in parts)
    return float(rdp.compute_epsilon(orders, divergences, spent[0][0].delta)[0])


@cache
def one_round(noise: float, num_clients: int, cohort: int) -> tuple[Any, Any]:
    """Return the orders of the accountant, and the Renyi divergence of one round at each.

    The noise's deviation is `noise` S, and replacing one client changes the sums by up to 2 S. So
    the noise multiplier is half of `noise`.
    """
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise InputError("dp-accounting is not installed: pip install 'fedhb[privacy]'") from None
    event: Any = dp_accounting.GaussianDpEvent(noise / 2.0)
    if cohort < num_clients:
        event = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, cohort, event)
    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    accountant.compose(event)
    return accountant.orders, accountant.rdp


class Private:
    """An algorithm whose sums are clipped and noised; all else is left to the algorithm."""

    def __init__(self, algorithm: Algorithm, privacy: Mechanism):
        release = declared_release(algorithm)
        if release is None:
            raise InputError(
                f"dp_noise={privacy.noise} with {_name_of(algorithm)}: it does not declare "
                f"how its sums may be released; choose {', '.join(releasing())}"
            )
        self.algorithm, self.privacy = algorithm, privacy
        self.release: Release = release

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def bound(self) -> float:
        """Return S."""
        return float(self.release.bound(self.privacy.clip))

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the sum of the clients' clipped contributions."""
        count = len(next(iter(answers.values())))
        unreleased = [
            key for key, kind in self.algorithm.answer.items() if isinstance(kind, Reported)
        ]
        weights = [
            key for key, kind in self.algorithm.answer.items() if isinstance(kind, NumExamples)
        ]
        total: Arrays | None = None
        for c in range(count):
            sent = {
                key: value[c : c + 1] if key in self.algorithm.each else value
                for key, value in received.items()
            }
            answer = {key: value[c : c + 1] for key, value in answers.items()}
            answer |= {key: torch.ones_like(answer[key]) for key in weights if key in answer}
            if self.release.clip_answers:
                answer = self.shortened(sent, answer)
            part = self.algorithm.summarise(problem, sent, answer, rng)
            part = {k: v for k, v in part.items() if k not in (*FIXED, *unreleased)}
            total = add(total, self.clipped(part))
        assert total is not None
        return total | {"count": torch.tensor(float(count), dtype=torch.float64)}

    def shortened(self, received: Arrays, answer: Arrays) -> Arrays:
        """Return an answer [1, ...] with its vectors' differences together no longer than C."""
        references = {
            key: received[kind.relative_to]
            for key, kind in self.algorithm.answer.items()
            if isinstance(kind, Vector) and key in answer and kind.relative_to in received
        }
        gaps = {key: answer[key] - reference for key, reference in references.items()}
        squares = torch.stack([gap.double().square().sum() for gap in gaps.values()])
        length = float(squares.sum().sqrt())
        scale = min(1.0, self.privacy.clip / length) if length > 0 else 1.0
        return answer | {key: references[key] + scale * gap for key, gap in gaps.items()}

    def clipped(self, part: Arrays) -> Arrays:
        """Return a contribution no longer than S over all of its arrays; withheld ones are zero."""
        kept = {
            key: torch.zeros_like(value, dtype=torch.float64)
            if key in self.release.withheld
            else value.double()
            for key, value in part.items()
        }
        squares = torch.stack([value.square().sum().cpu() for value in kept.values()])
        length = float(squares.sum().sqrt())
        scale = min(1.0, self.bound() / length) if length > 0 else 1.0
        return {key: value * scale for key, value in kept.items()}

    def noised(self, summary: Arrays, round_number: int) -> Arrays:
        """Return what is released: sums with noise, and the cohort's size for every count."""
        deviation = self.privacy.noise * self.bound()
        released: Arrays = {}
        name = f"noise {round_number} {self.mark(summary)}"
        for key, value in summary.items():
            if key in self.release.withheld:
                released[key] = value
            elif key not in FIXED:
                noise = self.privacy.normal(f"{name} {key}", value.shape)
                released[key] = value + deviation * noise.to(value.device)
        size = torch.tensor(float(self.privacy.cohort), dtype=torch.float64)
        return released | dict.fromkeys(FIXED, size)

    def mark(self, summary: Arrays) -> str:
        """Return a hash of the sums, which the noise depends on.

        A round that is run again over other answers would else have the same noise, and the
        difference of both releases none.
        """
        digest = hashlib.sha256()
        absorb(digest, [summary[key] for key in sorted(summary.keys() - set(FIXED))])
        return digest.hexdigest()

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the algorithm's new state from the noised sums, once they are repaired."""
        released = self.noised(summary, rng.round)
        released = self.release.repair(released, self.privacy.noise * self.bound())
        return self.algorithm.aggregate(problem, server, released, rng)

    def report(
        self, problem: Problem, server: Arrays, summary: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Record nothing of the sums."""
        return {}


def releasing() -> list[str]:
    """Return the names of the algorithms that private runs can train."""
    return [name for name, kind in ALGORITHMS.items() if vars(kind).get("release") is not None]


def _name_of(steps: Any) -> str:
    """Return the name of an algorithm, or what a phase without one is called."""
    return str(getattr(steps, "name", "") or f"the phase {type(steps).__name__}")
