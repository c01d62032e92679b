"""Training as the terminal shows it."""

from __future__ import annotations

import csv
import io

from rich.console import Console

from fedhb.engine.loop import State
from fedhb.runs import loggers
from fedhb.runs.progress import RunTable


def lines_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_live_table_shows_private_runs_and_regressions_too():
    """Their records lack the loss, the score, or both."""
    shown = RunTable(["one"], Console(file=io.StringIO(), force_terminal=True, width=100))
    row = shown.callback("one")
    row.on_start(0, 3)
    for done, (loss, score, says) in enumerate(
        [(0.5, 0.25, ["loss 0.500", "score 0.250"]), (0.5, None, ["loss 0.500"]), (None, None, [])],
        start=1,
    ):
        row.on_round({"round": done, "loss": loss, "score": score}, State({}, done=done))
        cells = [list(column.cells) for column in shown._table().columns]
        assert [str(c[0]) for c in cells[1:4]] == [
            f"round {done}/3",
            *says,
            *([""] * (2 - len(says))),
        ]


def test_numbers_that_come_later_have_a_column_too(tmp_path):
    log = loggers.CsvLog(tmp_path / "x")
    log.on_start(0, 3)
    for record in (
        {"round": 1, "a": 1.0},
        {"round": 2, "a": 2.0, "b": 5.0},
        {"round": 3, "b": 6.0},
    ):
        log.on_round(record, State({}))
    assert lines_of(tmp_path / "x/log.csv") == [
        {"round": "1", "a": "1.0", "b": ""},
        {"round": "2", "a": "2.0", "b": "5.0"},
        {"round": "3", "a": "", "b": "6.0"},
    ]
