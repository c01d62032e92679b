"""Differential privacy at the level of clients: what a round releases hardly depends on any one client.

A client's whole contribution to the sums, in differences to what it received, is one vector. It is clipped to a length S, the
sums get Gaussian noise of deviation `noise` S in every coordinate, and whatever is divided by is a constant: clients count alike,
and the count is the cohort's size however many answered. Losses and scores are not released.

S is `clip` = C, unless the algorithm clips what its client found and knows a bound of the sums: NIW clips d = m_i - m0 to C, and
its sums (d, d^2) are then no longer than sqrt(C^2 + C^4). The vector is cut to S in any case.

Neighbours are federations that differ in one client (replaced by any other), so the sums differ by at most 2 S. Cohorts are drawn
without replacement; dp-accounting's Renyi accountant composes the rounds (Wang, Balle, Kasiviswanathan 2019, for the sampling).

Noise and cohorts come from a secret key by SHAKE-256. A generator for simulations will not do: torch's has 32 bits of seed, and
whoever sees two successive models can try them all. Nor will the run's seed do for cohorts: sampling makes epsilon smaller only
where nobody knows who was sampled.
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

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.algorithms.toolbox import REPORTS, add
from fedhb.errors import InputError
from fedhb.seeding import Randomness, absorb

FIXED = ("count", "weight", "examples")
"""Sums that are the cohort's size where every client counts alike."""


@dataclass(frozen=True)
class Privacy:
    """The mechanism: noise in units of the longest contribution, its bound C, delta, and who is sampled from whom.

    `key` is the secret that noise and cohorts are drawn from: who knows it can take the noise away. It is kept with the run, so
    that a resumed run draws the same.
    """

    noise: float
    clip: float
    delta: float
    num_clients: int
    cohort: int
    key: bytes = field(repr=False, compare=False, default=b"")

    @property
    def mark(self) -> str:
        """Which key it is, without telling it."""
        return hashlib.sha256(b"which key of noise and cohorts: " + self.key).hexdigest()

    def words(self, what: str, count: int) -> np.ndarray:
        """`count` random numbers of 64 bits that the key and `what` decide, and that nobody can foretell without the key."""
        return np.frombuffer(
            hashlib.shake_256(self.key + what.encode()).digest(8 * count), dtype="<u8"
        )

    def normal(self, what: str, shape: Sequence[int]) -> torch.Tensor:
        """Standard normal numbers in float64, by Box and Muller's method: sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v)."""
        count = math.prod(shape)
        half = -(-count // 2)
        u, v = (self.words(what, 2 * half) >> np.uint64(11)).reshape(2, half) * 2.0**-53
        length, angle = np.sqrt(-2.0 * np.log1p(-u)), 2.0 * np.pi * v
        both = np.concatenate([length * np.cos(angle), length * np.sin(angle)])
        return torch.from_numpy(both[:count]).reshape(tuple(shape))

    def draw(self, round_number: int) -> list[int]:
        """The positions of a round's clients, without replacement, in ascending order."""
        order = np.argsort(self.words(f"cohort {round_number}", self.num_clients))
        return sorted(order[: self.cohort].tolist())

    def epsilon(self, rounds: int) -> float:
        """What so many rounds cost, at `delta`."""
        return epsilon(self.noise, self.num_clients, self.cohort, rounds, self.delta)

    def record(self, rounds: int) -> dict[str, Any]:
        """For result.json."""
        return {
            "epsilon": self.epsilon(rounds),
            "delta": self.delta,
            "noise": self.noise,
            "clip": self.clip,
            "neighbours": "one client replaced",
            "sampling": f"{self.cohort} of {self.num_clients} clients a round, without replacement, in secret",
            "protects": "the data behind the weights; not the scaling of inputs and targets, nor the numbers of an evaluation",
        }


def epsilon(noise: float, num_clients: int, cohort: int, rounds: int, delta: float) -> float:
    """The privacy loss of `rounds` rounds by the Renyi accountant of dp-accounting: divergences add up over rounds."""
    orders, divergences = one_round(noise, num_clients, cohort)
    from dp_accounting import rdp

    return float(rdp.compute_epsilon(orders, rounds * divergences, delta)[0])


@cache
def one_round(noise: float, num_clients: int, cohort: int) -> tuple[Any, Any]:
    """The orders of the accountant and the Renyi divergence of one round at each.

    The noise's deviation is `noise` S and replacing one client changes the sums by up to 2 S: half of it is the multiplier.
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
    """An algorithm whose sums are clipped and noised; all else is the algorithm's own. Engines need to know nothing of it."""

    def __init__(self, algorithm: Algorithm, privacy: Privacy):
        if not vars(type(algorithm)).get("private", False):
            raise InputError(
                f"dp_noise={privacy.noise} with {algorithm.name}: its sums are not averages of bounded vectors; "
                "choose niw, mixture, fedavg, fedprox or fedbabu"
            )
        self.algorithm, self.privacy = algorithm, privacy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def bound(self) -> float:
        """S."""
        own = getattr(self.algorithm, "contribution_bound", None)
        return float(own(self.privacy.clip)) if own is not None else self.privacy.clip

    def withheld(self) -> tuple[str, ...]:
        """Sums that the algorithm does without."""
        return tuple(getattr(self.algorithm, "withheld", ()))

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """The sum of the clients' clipped contributions, each client for itself."""
        count = len(found["examples"])
        total: Arrays | None = None
        for c in range(count):
            own = {
                key: value[c : c + 1] if key in self.algorithm.each else value
                for key, value in received.items()
            }
            one = {key: value[c : c + 1] for key, value in found.items()}
            one["examples"] = torch.ones_like(one["examples"])
            shorten = getattr(self.algorithm, "shorten", None)
            if shorten is not None:
                one = shorten(own, one, self.privacy.clip)
            part = self.algorithm.summarise(problem, own, one, rng)
            total = add(
                total, self.clipped({k: v for k, v in part.items() if k not in (*FIXED, *REPORTS)})
            )
        assert total is not None
        return total | {"count": torch.tensor(float(count), dtype=torch.float64)}

    def clipped(self, part: Arrays) -> Arrays:
        """A contribution, no longer than S over all of its arrays together; what is withheld is zero."""
        kept = {
            k: v.double() if k not in self.withheld() else torch.zeros_like(v, dtype=torch.float64)
            for k, v in part.items()
        }
        length = float(torch.stack([v.square().sum().cpu() for v in kept.values()]).sum().sqrt())
        scale = min(1.0, self.bound() / length) if length > 0 else 1.0
        return {key: value * scale for key, value in kept.items()}

    def noised(self, summary: Arrays, round_number: int) -> Arrays:
        """What is released: the sums with noise, and the cohort's size in place of every count."""
        deviation, found = self.privacy.noise * self.bound(), {}
        name = f"noise {round_number} {self.mark(summary)}"
        for key, value in summary.items():
            if key in FIXED:
                continue
            if key in self.withheld():
                found[key] = value
                continue
            found[key] = value + deviation * self.privacy.normal(f"{name} {key}", value.shape).to(
                value.device
            )
        size = torch.tensor(float(self.privacy.cohort), dtype=torch.float64)
        return found | dict.fromkeys(FIXED, size)

    def mark(self, summary: Arrays) -> str:
        """A hash of the sums. Noise depends on them: a round that is run again over other answers would else have the same, and
        the difference of both releases none."""
        digest = hashlib.sha256()
        absorb(digest, [summary[key] for key in sorted(summary.keys() - set(FIXED))])
        return digest.hexdigest()

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """The algorithm's own, from the noised sums; first it may put right what noise makes impossible."""
        released = self.noised(summary, rng.round)
        repair = getattr(self.algorithm, "repair", None)
        if repair is not None:
            released = repair(released, self.privacy.noise * self.bound())
        return self.algorithm.aggregate(problem, server, released, rng)

    def report(
        self, problem: Problem, server: Arrays, summary: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Nothing of the sums."""
        return {}
