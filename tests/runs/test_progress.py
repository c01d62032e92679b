"""Training as the terminal shows it."""

from __future__ import annotations

import csv
import io

from rich.console import Console

from fedhb.engine.loop import State
from fedhb.runs import loggers
from fedhb.runs.progress import RunTable

from fedhb.engine.loop import State
from fedhb.runs import jobs, loggers, tune
from fedhb.runs.progress import JobProgress, RunTable


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
        row.on_round({"loss": loss, "score": score}, State({}, done=done))
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


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            {"global": {"accuracy": 0.5, "nll": 1.0}, "personalised": {"accuracy": 0.75}},
            "global 50.00 %, personalised 75.00 %",
        ),
        (
            {"global": {"rmse": 12.3456, "nll": 1.5}, "personalised": None},
            "global RMSE 12.35, NLL 1.5",
        ),
    ],
)
def test_a_record_says_what_it_found_also_of_real_targets(result, says):
    console = Console(file=io.StringIO(), width=200)
    shown = JobProgress("small", console)
    shown.begin(1)
    shown.recorded({"key": {"cell": "one", "seed": 0}, "seconds": 1.0, "result": result})
    assert f"1/1 one, seed 0: 1.0 s, {says}; 0 s left" in console.file.getvalue()


def test_progress_of_several_stages_on_a_terminal():
    """Rich allows one display at a time; tuning begins one for every stage."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(tune.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    for _ in range(2):
        shown.begin(1)
        shown.tell(job, 0.5, "round 1/2")
        shown.recorded({"key": job.key, "seconds": 1.0, "result": {"global": {"accuracy": 0.5}}})
    shown.close()
    shown.close()
    assert console.file.getvalue().count("1/1 one, niw, seed 0: 1.0 s, global 50.00 %") == 2


def test_long_work_says_how_it_goes_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("fedhb.runs.progress.time.monotonic", lambda: next(clock))
    clock = iter([0.0, 1.0, 1.0, 200.0, 200.0, 302.0, 302.0, 302.0, 400.0, 400.0])
    console = Console(file=io.StringIO(), width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(tune.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    shown.begin(1)
    for done in (1, 2, 3, 4):
        shown.tell(job, 0.5, f"round {done}/4")
    assert console.file.getvalue() == "one, niw, seed 0: round 3/4\n"
