"""Times side by side: contenders take turns, so that other load hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedhb_paper.bench.processes import Tell

REFERENCE = "plain_torch_1"


def alternate(
    rounds: Mapping[str, Callable[[], object]],
    repeats: int,
    tell: Tell,
    *,
    settle: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of `repeats` rounds of each contender, after a warm-up.

    With `settle`, each contender runs one untimed round before its timed one: the contender
    before it has emptied the caches, which does not happen in a real run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(repeats + 1):
        for position, (name, one_round) in enumerate(rounds.items()):
            tell((repeat * len(rounds) + position) / ((repeats + 1) * len(rounds)), name)
            if settle or not repeat:
                one_round()
            if repeat:
                started = clock()
                one_round()
                seconds[name].append(clock() - started)
    return seconds


def best_of(seconds: dict[str, list[float]], variants: Sequence[str]) -> str:
    """Return the variant with the lowest median."""
    return min(variants, key=lambda name: statistics.median(seconds[name]))


def compare(seconds: Mapping[str, Sequence[float]], scale: float = 1.0) -> dict[str, Any]:
    """Return the median seconds (times `scale`) of each contender by its name.

    `ratio` has the ratio of medians to the reference (above 1: faster), `spread` the quartiles of
    the ratios within each turn.
    """
    middle = {name: scale * statistics.median(times) for name, times in seconds.items()}
    ratio = {name: middle[REFERENCE] / value for name, value in middle.items()}
    spread = {
        name: quartiles([a / b for a, b in zip(seconds[REFERENCE], times, strict=True)])
        for name, times in seconds.items()
    }
    return {**middle, "ratio": ratio, "spread": spread}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower and the upper quartile; of a single value: itself twice."""
    if len(values) == 1:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def over(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> dict[str, Any]:
    """Return how many rounds of `other` a round of `name` costs.

    It is the ratio of medians, with the quartiles of the ratios within each turn.
    """
    ratio = statistics.median(seconds[name]) / statistics.median(seconds[other])
    return {
        "ratio": ratio,
        "quartiles": quartiles([a / b for a, b in zip(seconds[name], seconds[other], strict=True)]),
    }
