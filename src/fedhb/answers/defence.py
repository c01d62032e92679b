"""Filters between clients' answers and the sums, for every algorithm: [n, ...] -> [n', ...].

    refuse      leaves out answers with NaN or infinity, or `most` times longer than the bound
    clip        shortens longer answers to `longest` times the bound; holds measurements between
                zero and `most` times the median of the clients that measured; makes shares sum to 1
    winsorise   moves each coordinate between the cohort's (k+1)-th smallest and (k+1)-th largest
                value, k = share n
    krum        leaves out the share n answers that are farthest from their nearest neighbours
                (multi-Krum)

The length of an answer is that of its differences to what was sent, all its vectors together. The
bound is the median of the last rounds' median lengths and of this one's: fewer than half of the
clients cannot move it. The algorithm's `answer` says which arrays are vectors, measurements and
shares. Filters see single answers: the server holds n of them, O(n d), instead of their sum, O(d);
their differences take as much again, and so does winsorising.

P. Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017 (multi-Krum); D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018
(coordinate-wise trimming).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import (
    Algorithm,
    Arrays,
    ClientId,
    Kind,
    Measurements,
    Problem,
    Reported,
    Shares,
    Vector,
)
from fedhb.algorithms.toolbox import ROWS, SOUND
from fedhb.answers.admission import finite_rows
from fedhb.clients.clients import Clients
from fedhb.errors import DivergedError, InputError
from fedhb.seeding import Randomness
from fedhb.settings_fields import filters
from fedhb.training.plan import Plan

DEFAULT = ("refuse", "clip")
"""Where clients differ, filters that drop or trim more lose what only a few clients know
(measured: experiments/hostile)."""

LEAST_LEFT = 0.25
"""The share of a round's answers that must be left. Where a fifth of all clients is hostile, half
of a small cohort may be."""


@dataclass(frozen=True)
class Defence:
    """The filters of a run.

    Attributes:
        filters: their names, of refuse, clip, winsorise and krum.
        share: the share of hostile clients that winsorise and krum expect.
        longest: clip: the longest answer, in units of the bound.
        most: refuse: the longest answer, in units of the bound; the same for measurements.
    """

    filters: tuple[str, ...] = DEFAULT
    share: float = 0.2
    longest: float = 2.0
    most: float = 5.0

    @classmethod
    def named(cls, text: str) -> Defence | None:
        """Return the defence that a setting names: "" for none, "default", or names with commas."""
        names = filters(text, DEFAULT)
        return cls(names) if names else None


@dataclass(frozen=True)
class Defended:
    """An algorithm whose clients' answers are filtered. All else is the algorithm's own."""

    algorithm: Any
    defence: Defence

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "algorithm"), name)

    @property
    def answer(self) -> Mapping[str, Kind]:
        """The algorithm's declaration, and what is added to an answer here."""
        return {**self.algorithm.answer, ROWS: ClientId(), SOUND: Reported()}

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return the answers with their clients' ids; zeros replace one that is not finite."""
        answers, new = self.algorithm.local_update(problem, received, clients, memory, plan, rng)
        sound = finite_rows(answers)
        if not sound.all():
            answers = {
                key: _where(sound, value, torch.zeros_like(value)) for key, value in answers.items()
            }
            new = {key: _where(sound, value, memory[key]) for key, value in new.items()}
        return answers | {ROWS: clients.ids.clone(), SOUND: sound}, new

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the answers themselves: nothing is summed before all of them are there."""
        return answers

    def sift(
        self,
        problem: Problem,
        server: Arrays,
        gathered: Arrays,
        rng: Randomness,
        lengths: Sequence[float],
    ) -> tuple[Arrays, float, dict[str, Any]]:
        """Filter a round's answers.

        Args:
            problem, server, rng: as for every step.
            gathered: the answers of all clients of the round.
            lengths: the median lengths of the rounds before.

        Returns:
            The sums over the answers that are left, this round's median length, and what to record.
        """
        ids = gathered[ROWS].tolist()
        finite = gathered[SOUND].nonzero().flatten().tolist()
        order = sorted(finite, key=lambda k: ids[k])  # whichever process trained them
        if len(order) < LEAST_LEFT * len(ids):
            raise _too_few_left(rng.round, len(ids) - len(order), len(ids), "NaN or infinity")
        answers = {k: v[order] for k, v in gathered.items() if k not in (ROWS, SOUND)}
        received = self.algorithm.broadcast(server, [ids[k] for k in order])
        vectors = Vectors.of(answers, received, self.algorithm)
        norms = vectors.norms()
        middle = median(norms.tolist())
        bound = median([*lengths, middle])
        stay = list(range(len(order)))
        clipped = 0
        if "refuse" in self.defence.filters and bound > 0:
            stay = [k for k in stay if norms[k] <= self.defence.most * bound]
            if len(stay) < LEAST_LEFT * len(ids):
                why = f"vectors {self.defence.most:g} times too long"
                raise _too_few_left(rng.round, len(ids) - len(stay), len(ids), why)
        if "krum" in self.defence.filters:
            stay = krum(vectors.take(stay), stay, self.defence.share)
        vectors = vectors.take(stay)
        clips = "clip" in self.defence.filters
        if clips and bound > 0:
            longest = self.defence.longest * bound
            tiny = torch.finfo(torch.float64).tiny
            scale = (longest / norms[stay].clamp_min(tiny)).clamp_max(1.0)
            clipped = int((scale < 1.0).sum())
            vectors.scale(scale)
        if "winsorise" in self.defence.filters:
            vectors.winsorise(self.defence.share)
        answers = {key: value[stay] for key, value in answers.items()} | vectors.arrays()
        if clips:
            answers |= self._within_bounds(answers)
        left = [ids[order[k]] for k in stay]
        received = self.algorithm.broadcast(server, left)
        summary = self.algorithm.summarise(problem, received, answers, rng)
        summary = {key: value.double() for key, value in summary.items()}
        refused = len(set(ids) - set(left))
        return summary, middle, {"refused": refused, "clipped": clipped, "answer_norm": middle}

    def _within_bounds(self, answers: Arrays) -> Arrays:
        """Return the measurements and shares of the answers within their bounds."""
        bounded: Arrays = {}
        for key, value in answers.items():
            kind = self.algorithm.answer[key]
            if isinstance(kind, Measurements):
                bounded[key] = held(value, self.defence.most)
            elif isinstance(kind, Shares):
                bounded[key] = normalised(value)
        return bounded


def labelled(answer: Arrays, client: int) -> Arrays:
    """Return the answer [1, ...] of a client, with finite numbers, as `sift` takes it."""
    return answer | {ROWS: torch.tensor([client]), SOUND: torch.ones(1, dtype=torch.bool)}


def _too_few_left(round_number: int, refused: int, count: int, why: str) -> DivergedError:
    return DivergedError(
        f"round {round_number}: {refused} of {count} answers are refused ({why}): training "
        "diverges, or most clients are hostile; lower the learning rate"
    )


@dataclass
class Vectors:
    """The vectors of the answers as differences [n, ...].

    The difference is to what was sent, or to the median answer where nothing like it was sent.
    """

    differences: Arrays
    references: Arrays
    count: int

    @classmethod
    def of(cls, answers: Arrays, received: Mapping[str, Tensor], algorithm: Any) -> Vectors:
        """Return the vectors that the algorithm declares."""
        references: Arrays = {}
        for key, value in answers.items():
            kind = algorithm.answer[key]
            if not isinstance(kind, Vector):
                continue
            sent = received.get(kind.relative_to) if kind.relative_to is not None else None
            if sent is None:
                references[key] = value.median(0, keepdim=True).values
            else:
                references[key] = sent if kind.relative_to in algorithm.each else sent.unsqueeze(0)
        differences = {key: answers[key] - references[key] for key in references}
        return cls(differences, references, len(next(iter(answers.values()))))

    def take(self, rows: Sequence[int]) -> Vectors:
        """Return the vectors of some clients."""
        references = {k: v[rows] if len(v) > 1 else v for k, v in self.references.items()}
        differences = {k: v[rows] for k, v in self.differences.items()}
        return Vectors(differences, references, len(rows))

    def norms(self) -> Tensor:
        """Return the length of each answer, float64 [n]."""
        squares = (v.flatten(1).double().square().sum(1) for v in self.differences.values())
        return sum(squares, torch.zeros(self.count)).double().sqrt()

    def scale(self, by: Tensor) -> None:
        """Multiply each answer's differences."""
        for value in self.differences.values():
            value.mul_(by.to(value).view(-1, *[1] * (value.ndim - 1)))

    def winsorise(self, share: float) -> None:
        """Move the smallest and largest values of each coordinate to the next that is left."""
        for value in self.differences.values():
            k = min(math.ceil(share * len(value)), (len(value) - 1) // 2)
            if k > 0:
                ordered = value.sort(0).values
                value.clamp_(ordered[k], ordered[-1 - k])

    def products(self) -> Tensor:
        """Return inner products of the answers' differences, float64 [n, n]."""
        rows = (value.flatten(1).double() for value in self.differences.values())
        total: Tensor = sum((r @ r.T for r in rows), torch.zeros(self.count, self.count))
        return total.cpu()

    def distances(self) -> Tensor:
        """Return squared distances between answers, float64 [n, n]."""
        products = self.products()
        squares = products.diagonal()
        return (squares.unsqueeze(0) + squares.unsqueeze(1) - 2.0 * products).clamp_min(0.0)

    def arrays(self) -> Arrays:
        """Return the answers' vectors again."""
        return {key: self.references[key] + value for key, value in self.differences.items()}


def krum(vectors: Vectors, rows: Sequence[int], share: float) -> list[int]:
    """Return the rows but the f = share n whose n - f - 2 nearest distances sum up highest."""
    n, f = len(rows), math.floor(share * len(rows) + 1e-9)
    if f == 0 or n - f - 2 < 1:
        return list(rows)
    # the first distance is that to itself
    nearest = vectors.distances().sort(1).values[:, 1 : n - f - 1]
    best = nearest.sum(1).argsort(stable=True)[: n - f]
    return [rows[k] for k in sorted(best.tolist())]


def held(numbers: Tensor, most: float) -> Tensor:
    """Return numbers [n, k] from zero to `most` times the median of the positive ones by column."""
    kept = numbers.clamp_min(0.0)
    for column in kept.unbind(1):
        positive = column[column > 0]
        if len(positive):
            column.clamp_(max=most * positive.median().item())
    return kept


def normalised(shares: Tensor) -> Tensor:
    """Return rows [n, k] of non-negative numbers that sum to one.

    A row that is right already stays as it is, to the bit. A row without a positive number becomes
    equal shares.
    """
    kept = shares.clamp_min(0.0)
    kept = torch.where(kept.any(1, keepdim=True), kept, 1.0)
    kept = kept / kept.amax(1, keepdim=True)  # the sum of the largest numbers would overflow
    sums_to_one = (shares.sum(1, keepdim=True) - 1.0).abs() < 1e-3
    right = (shares >= 0).all(1, keepdim=True) & sums_to_one
    return torch.where(right, shares, kept / kept.sum(1, keepdim=True))


def _where(sound: Tensor, value: Tensor, other: Tensor) -> Tensor:
    rows = sound.to(value.device).view(-1, *[1] * (value.ndim - 1))
    return torch.where(rows, value, other)


def defended(algorithm: Algorithm, defence: Defence | None) -> Any:
    """Return the algorithm behind these filters. It must have clients that send something."""
    if defence is None:
        return algorithm
    if algorithm.pools or not algorithm.sends:
        raise InputError(
            f"defence with {getattr(algorithm, 'name', 'a phase')}: it has no answers of clients "
            "to filter; leave it out"
        )
    return Defended(algorithm, defence)
