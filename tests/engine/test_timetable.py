"""Which exchange comes when: phases before the rounds, rounds, phases after."""

from __future__ import annotations

import pytest

from fedhb.algorithms.contract import Phase
from fedhb.engine.timetable import Stage, Timetable


def stage(name: str, when: str, times: int) -> Stage:
    phase = Phase(name, None, when, times)  # type: ignore[arg-type]
    return Stage(phase, None, lambda number: [number])


TABLE = Timetable(
    3, (stage("ask", "before", 2), stage("tell", "after", 1), stage("more", "before", 1))
)


def test_without_phases_an_exchange_is_a_round():
    table = Timetable(3)
    assert table.total == 3 and [table.stage(n) for n in (1, 2, 3)] == [None] * 3
    assert [table.rounds_done(done) for done in range(4)] == [0, 1, 2, 3]


def test_the_order_of_exchanges():
    names = [s.phase.name if (s := TABLE.stage(n)) else "round" for n in range(1, TABLE.total + 1)]
    assert names == ["ask", "ask", "more", "round", "round", "round", "tell"]


@pytest.mark.parametrize(
    ("done", "rounds", "asked", "told"), [(0, 0, 0, 0), (1, 0, 1, 0), (5, 2, 2, 0), (7, 3, 2, 1)]
)
def test_what_is_done_after_so_many_exchanges(done, rounds, asked, told):
    assert TABLE.rounds_done(done) == rounds
    assert TABLE.times(TABLE.stages[0], done) == asked
    assert TABLE.times(TABLE.stages[1], done) == told
