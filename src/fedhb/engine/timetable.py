"""The exchanges of a run: the phases before the rounds, the rounds, the phases after.

An exchange asks a cohort once. All are numbered from 1: the number seeds the randomness of an
exchange, and tells where a stopped run goes on. Without phases it is the number of the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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

    @classmethod
    def of_round(cls, algorithm: Any, draw: Draw) -> Stage:
        """Return a round of the algorithm, which has no phase's name."""
        return cls(Phase("", algorithm), algorithm, draw)


@dataclass(frozen=True)
class Timetable:
    """The order of rounds and stages."""

    rounds: int
    stages: tuple[Stage, ...] = ()

    @cached_property
    def before(self) -> tuple[Stage, ...]:
        """The stage of each exchange before the first round."""
        return self._exchanges("before")

    @cached_property
    def after(self) -> tuple[Stage, ...]:
        """The stage of each exchange after the last round."""
        return self._exchanges("after")

    @property
    def total(self) -> int:
        """The number of exchanges."""
        return len(self.before) + self.rounds + len(self.after)

    def stage(self, number: int) -> Stage | None:
        """Return the stage of this exchange, or None where it is a round."""
        if number <= len(self.before):
            return self.before[number - 1]
        later = number - len(self.before) - self.rounds
        return self.after[later - 1] if later > 0 else None

    def rounds_done(self, done: int) -> int:
        """Return how many rounds are among the first `done` exchanges."""
        return min(max(done - len(self.before), 0), self.rounds)

    def times(self, stage: Stage, done: int) -> int:
        """Return how often this stage is among the first `done` exchanges."""
        after = self.after[: max(0, done - len(self.before) - self.rounds)]
        return sum(other is stage for other in (*self.before[:done], *after))

    def _exchanges(self, when: str) -> tuple[Stage, ...]:
        stages = (stage for stage in self.stages if stage.phase.when == when)
        return tuple(stage for stage in stages for _ in range(stage.phase.times))
