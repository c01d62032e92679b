"""Robust filters between what clients send and the sums: found [n, ...] -> found' [n', ...], for every algorithm.

    refuse      answers with NaN or infinity, or longer than `most` times the running bound, are left out
    clip        longer answers are shortened to `longest` times the bound; the few numbers beside them are held, NIW's curvature
                and time between zero and `most` times the median of the clients that have some in this round, FedEM's pi to
                shares that sum to one
    winsorise   each coordinate is moved between the cohort's (k+1)-th smallest and (k+1)-th largest, k = share n
    krum        the share n answers that are farthest from their nearest neighbours are left out (multi-Krum)

An answer's length is that of its difference to what was sent, all its vectors together; the bound is the median of the last
rounds' median lengths and of this one's, which fewer than half of the clients cannot move. Filters see individual answers: the
server holds n answers, O(N_f d), instead of their sum, O(d); their differences take as much again, and so does winsorising.

A. Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017 (multi-Krum);
D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018 (coordinate-wise trimming).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.algorithms.toolbox import REPORTS, ROWS, SOUND
from fedhb.answers.admission import NUMBERS, finite_rows
from fedhb.clients.clients import Clients
from fedhb.errors import DivergedError, InputError
from fedhb.seeding import Randomness
from fedhb.settings_fields import filters
from fedhb.training.plan import Plan

DEFAULT = ("refuse", "clip")
"""Where clients differ, filters that drop or trim more lose what few of them know (measured: experiments/hostile)."""

LEAST = 0.25
"""The share of a round's answers that must be left: of a small cohort, half may be hostile where a fifth of all clients is."""

SENT_AS = {"m": "m0"}
"""Vectors that are not sent down under the name they come back with."""

SHARES = "pi"
"""A client's shares of several learners [n, k]."""

LEFT = (*REPORTS, "examples", "group", "client", NUMBERS, SHARES, "g", ROWS, SOUND)
"""What is not a vector of weights: reports, counts, and what few clients send."""


@dataclass(frozen=True)
class Defence:
    """Which filters, and the share of the clients that they reckon with."""

    filters: tuple[str, ...] = DEFAULT
    share: float = 0.2
    longest: float = 2.0
    most: float = 5.0

    @classmethod
    def named(cls, text: str) -> Defence | None:
        """From a setting: "" for none, "default", or names with commas between them."""
        names = filters(text, DEFAULT)
        return cls(names) if names else None


@dataclass(frozen=True)
class Defended:
    """An algorithm whose clients' answers are filtered; in everything else it is the algorithm itself."""

    algorithm: Any
    defence: Defence

    gathers = True

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "algorithm"), name)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """The clients' answers with their ids; one that is not finite is replaced, and marked."""
        found, new = self.algorithm.local_update(problem, received, clients, memory, plan, rng)
        sound = finite_rows(found)
        if not sound.all():
            found = {
                key: _where(sound, value, torch.zeros_like(value)) for key, value in found.items()
            }
            new = {key: _where(sound, value, memory[key]) for key, value in new.items()}
        return found | {ROWS: clients.ids.clone(), SOUND: sound}, new

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """Nothing is summed before all answers are there."""
        return found

    def sift(
        self,
        problem: Problem,
        server: Arrays,
        gathered: Arrays,
        rng: Randomness,
        lengths: Sequence[float],
    ) -> tuple[Arrays, float, dict[str, Any]]:
        """The sums over the answers that are left, this round's median length, and what there is to record."""
        ids, kept = gathered[ROWS].tolist(), gathered[SOUND].nonzero().flatten().tolist()
        order = sorted(kept, key=lambda k: ids[k])  # whoever trained them, and in which chunks
        if len(order) < LEAST * len(ids):
            raise _refusal(rng.round, len(ids) - len(order), len(ids), "NaN or infinity")
        found = {key: value[order] for key, value in gathered.items() if key not in (ROWS, SOUND)}
        received = self.algorithm.broadcast(server, [ids[k] for k in order])
        vectors = Vectors.of(found, received, self.algorithm.each)
        norms = vectors.norms()
        middle = median(norms.tolist())
        bound = median([*lengths, middle])
        stay = list(range(len(order)))
        clipped = 0
        if "refuse" in self.defence.filters and bound > 0:
            stay = [k for k in stay if norms[k] <= self.defence.most * bound]
            if len(stay) < LEAST * len(ids):
                raise _refusal(
                    rng.round,
                    len(ids) - len(stay),
                    len(ids),
                    f"vectors {self.defence.most:g} times too long",
                )
        if "krum" in self.defence.filters:
            stay = krum(vectors.take(stay), stay, self.defence.share)
        vectors = vectors.take(stay)
        if "clip" in self.defence.filters and bound > 0:
            longest = self.defence.longest * bound
            scale = (longest / norms[stay].clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(
                1.0
            )
            clipped = int((scale < 1.0).sum())
            vectors.scale(scale)
        if "winsorise" in self.defence.filters:
            vectors.winsorise(self.defence.share)
        left = [order[k] for k in stay]
        found = {key: value[stay] for key, value in found.items()} | vectors.arrays()
        if "clip" in self.defence.filters and NUMBERS in found:
            found[NUMBERS] = held(found[NUMBERS], self.defence.most)
        if "clip" in self.defence.filters and SHARES in found:
            found[SHARES] = normalised(found[SHARES])
        received = self.algorithm.broadcast(server, [ids[k] for k in left])
        summary = {
            key: value.double()
            for key, value in self.algorithm.summarise(problem, received, found, rng).items()
        }
        refused = sorted(set(ids) - {ids[k] for k in left})
        return summary, middle, {"refused": len(refused), "clipped": clipped, "answer_norm": middle}


def labelled(found: Arrays, client: int) -> Arrays:
    """The answer [1, ...] of one client, whose numbers are known to be finite, as `sift` takes it."""
    return found | {ROWS: torch.tensor([client]), SOUND: torch.ones(1, dtype=torch.bool)}


def _refusal(round_number: int, refused: int, count: int, why: str) -> DivergedError:
    return DivergedError(
        f"round {round_number}: {refused} of {count} answers are refused ({why}): training diverges, or most clients are "
        "hostile; lower the learning rate"
    )


@dataclass
class Vectors:
    """The differences [n, ...] of the clients' vectors to what was sent, or, where nothing like it was, to the median answer."""

    differences: Arrays
    references: Arrays

    @classmethod
    def of(cls, found: Arrays, received: Mapping[str, Tensor], each: Sequence[str]) -> Vectors:
        """The vectors of these answers."""
        keys = [
            key
            for key, value in found.items()
            if value.is_floating_point() and value.ndim > 1 and key not in LEFT
        ]
        references = {}
        for key in keys:
            sent = received.get(SENT_AS.get(key, key))
            if (
                sent is not None
                and (sent.shape if key in each else (len(found[key]), *sent.shape))
                == found[key].shape
            ):
                references[key] = sent if key in each else sent.unsqueeze(0)
            else:
                references[key] = found[key].median(0, keepdim=True).values
        return cls({key: found[key] - references[key] for key in keys}, references)

    def take(self, rows: Sequence[int]) -> Vectors:
        """Those of some clients."""
        own = {
            key: value[rows] if len(value) > 1 else value for key, value in self.references.items()
        }
        return Vectors({key: value[rows] for key, value in self.differences.items()}, own)

    def norms(self) -> Tensor:
        """The length of each answer, float64 [n]."""
        return (
            sum(
                (v.flatten(1).double().square().sum(1) for v in self.differences.values()),
                torch.zeros(()),
            )
            .double()
            .sqrt()
        )

    def scale(self, by: Tensor) -> None:
        """Shorten each answer."""
        for value in self.differences.values():
            value.mul_(by.to(value).view(-1, *[1] * (value.ndim - 1)))

    def winsorise(self, share: float) -> None:
        """Move the share of the smallest and of the largest values of each coordinate to the next that is left."""
        for value in self.differences.values():
            k = min(math.ceil(share * len(value)), (len(value) - 1) // 2)
            if k > 0:
                ordered = value.sort(0).values
                value.clamp_(ordered[k], ordered[-1 - k])

    def products(self) -> Tensor:
        """Inner products of the answers' differences, float64 [n, n]."""
        rows = (value.flatten(1).double() for value in self.differences.values())
        total: Tensor = sum((r @ r.T for r in rows), torch.zeros(()))
        return total.cpu()

    def distances(self) -> Tensor:
        """Squared distances between answers, float64 [n, n]."""
        products = self.products()
        squares = products.diagonal()
        return (squares.unsqueeze(0) + squares.unsqueeze(1) - 2.0 * products).clamp_min(0.0)

    def arrays(self) -> Arrays:
        """The answers again."""
        return {key: self.references[key] + value for key, value in self.differences.items()}


def krum(vectors: Vectors, rows: Sequence[int], share: float) -> list[int]:
    """The rows without the f = share n whose f nearest-neighbour distances, n - f - 2 of them, sum up highest."""
    n, f = len(rows), math.floor(share * len(rows) + 1e-9)
    if f == 0 or n - f - 2 < 1:
        return list(rows)
    nearest = (
        vectors.distances().sort(1).values[:, 1 : n - f - 1]
    )  # the first is the distance to itself
    best = nearest.sum(1).argsort(stable=True)[: n - f]
    return [rows[k] for k in sorted(best.tolist())]


def held(numbers: Tensor, most: float) -> Tensor:
    """Numbers [n, k], each at most so many times the median of those in its column that are not zero, and none below zero."""
    kept = numbers.clamp_min(0.0)
    for column in kept.unbind(1):
        some = column[column > 0]
        if len(some):
            column.clamp_(max=most * some.median().item())
    return kept


def normalised(shares: Tensor) -> Tensor:
    """Rows [n, k] without negative numbers that sum to one, as all but hostile clients send them, to the bit.

    What has no positive number becomes equal shares.
    """
    kept = shares.clamp_min(0.0)
    kept = torch.where(kept.any(1, keepdim=True), kept, 1.0)
    kept = kept / kept.amax(
        1, keepdim=True
    )  # before they are summed: the largest numbers would overflow
    honest = (shares >= 0).all(1, keepdim=True) & ((shares.sum(1, keepdim=True) - 1.0).abs() < 1e-3)
    return torch.where(honest, shares, kept / kept.sum(1, keepdim=True))


def _where(sound: Tensor, value: Tensor, other: Tensor) -> Tensor:
    return torch.where(sound.to(value.device).view(-1, *[1] * (value.ndim - 1)), value, other)


def defended(algorithm: Algorithm, defence: Defence | None) -> Any:
    """The algorithm behind these filters; one without clients of its own cannot have any."""
    if defence is None:
        return algorithm
    if algorithm.pools or not algorithm.sends:
        raise InputError(f"{algorithm.name} has no answers of clients to filter: leave out defence")
    return Defended(algorithm, defence)
