"""The exchanges of a run: the phases before the rounds, the rounds, the phases after.

An exchange asks a cohort once. All are numbered from 1: the number seeds the randomness of an
exchange, and tells where a stopped run goes on. Without phases it is the number of the round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedhb.algorithms.contract import Phase
from fedhb.engine.schedule import Draw


@dataclass(frozen=True)
class Stage:
    """A phase as a run carries it out.

    Attributes:
        phase: as the algorithm declares it.
        steps: its steps, behind the run's filters or with clipped and noised sums.
        draw: the clients that it asks, by the number of the exchange.
    """

    phase: Phase
    steps: Any
    draw: Draw


@dataclass(frozen=True)
class Timetable:
    """The order of rounds and stages."""

    rounds: int
    stages: tuple[Stage, ...] = ()

    @property
    def total(self) -> int:
        """The number of exchanges."""
        return (
            self.rounds + len(list(self._exchanges("before"))) + len(list(self._exchanges("after")))
        )

    def stage(self, number: int) -> Stage | None:
        """Return the stage of this exchange, or None where it is a round."""
        before = list(self._exchanges("before"))
        if number <= len(before):
            return before[number - 1]
        later = number - len(before) - self.rounds
        return list(self._exchanges("after"))[later - 1] if later > 0 else None

    def rounds_done(self, done: int) -> int:
        """Return how many rounds are among the first `done` exchanges."""
        return min(max(done - len(list(self._exchanges("before"))), 0), self.rounds)

    def times(self, stage: Stage, done: int) -> int:
        """Return how often this stage is among the first `done` exchanges."""
        before = list(self._exchanges("before"))
        after = list(self._exchanges("after"))[: max(0, done - len(before) - self.rounds)]
        return sum(other is stage for other in (*before[:done], *after))

    def _exchanges(self, when: str) -> Iterator[Stage]:
        for stage in self.stages:
            if stage.phase.when == when:
                yield from [stage] * stage.phase.times
