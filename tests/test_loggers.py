"""Numbers for other tools: every round once, also after a resumption, through a callback that anybody can write."""

from __future__ import annotations

import csv
import io
import json
import sys

import finished
import pytest
from rich.console import Console

import fedhb
from fedhb.cli import main
from fedhb.engine.loop import State
from fedhb.runs import loggers
from fedhb.runs.from_settings import train
from fedhb.runs.progress import RunTable
from fedhb.runs.settings import Settings


class Stop(fedhb.Callback):
    """Interrupts after some rounds."""

    def __init__(self, after):
        self.after = after

    def on_round(self, record, state):
        if record["round"] == self.after:
            raise KeyboardInterrupt


def settings(**more):
    return Settings.resolve(
        finished.SMALL | {"model": {"name": "mlp", "hidden": 16}} | more, {"algorithm": "mixture"}
    )


def lines_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_csv_has_every_round_and_every_number(tmp_path):
    train(
        settings(), tmp_path / "x", progress=False, callbacks=loggers.make(["csv"], tmp_path / "x")
    )
    rows = lines_of(tmp_path / "x/log.csv")
    records = [json.loads(line) for line in (tmp_path / "x/rounds.jsonl").read_text().splitlines()]
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, record in zip(rows, records, strict=True):
        assert (
            float(row["loss"]) == record["loss"]
            and float(row["responsibilities/1"]) == record["responsibilities"][1]
        )


def test_csv_of_a_resumed_run_has_no_round_twice(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(KeyboardInterrupt):
        train(
            settings(checkpoint_every=2),
            path,
            progress=False,
            callbacks=[*loggers.make(["csv"], path), Stop(3)],
        )
    with (path / "log.csv").open("a") as file:
        file.write("9,9\n")  # a line of a round that no checkpoint has
    train(
        settings(checkpoint_every=2),
        path,
        True,
        progress=False,
        callbacks=loggers.make(["csv"], path),
    )
    assert [row["round"] for row in lines_of(path / "log.csv")] == list("123456")


def test_tensorboard_has_rounds_and_result(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "x"
    with pytest.raises(KeyboardInterrupt):
        train(
            settings(checkpoint_every=2),
            path,
            progress=False,
            callbacks=[*loggers.make(["tensorboard"], path), Stop(3)],
        )
    run = train(
        settings(checkpoint_every=2),
        path,
        True,
        progress=False,
        callbacks=loggers.make(["tensorboard"], path),
    )
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("negative_elbo")[-1].value == pytest.approx(
        run.records[-1]["negative_elbo"], rel=1e-6
    )
    assert events.Scalars("result/personalised/accuracy")[0].value == pytest.approx(
        run.result["personalised"]["accuracy"]
    )


def test_a_callback_is_told_of_everything_in_order(tmp_path):
    told = []

    class All(fedhb.Callback):
        def on_start(self, done, rounds):
            told.append(("start", done, rounds))

        def on_round(self, record, state):
            told.append(("round", record["round"]))

        def on_end(self):
            told.append("end")

        def evaluating(self, done, clients):
            told.append(("evaluated", done, clients))

        def on_result(self, result):
            told.append(("result", (tmp_path / "x/result.json").exists(), result["rounds"]))

    train(settings(rounds=2), tmp_path / "x", progress=False, callbacks=[All()])
    assert told == [
        ("start", 0, 2),
        ("round", 1),
        ("round", 2),
        "end",
        ("evaluated", 8, 8),
        ("result", True, 2),
    ]


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code or 0


FLAGS = [
    "--num-clients",
    6,
    "--shards-per-client",
    3,
    "--fraction",
    0.5,
    "--rounds",
    2,
    "--personal-epochs",
    1,
]


def test_the_command_line_logs_every_run_of_a_comparison(monkeypatch, tmp_path, capsys):
    out = tmp_path / "c"
    assert (
        command(
            monkeypatch,
            "compare",
            *FLAGS,
            "--algorithms",
            "niw,fedavg",
            "--seeds",
            0,
            "--out",
            out,
            "--log",
            "csv",
        )
        == 0
    )
    for name in ("niw", "fedavg"):
        assert len((out / f"{name}-seed0/log.csv").read_text().splitlines()) == 3
    said = capsys.readouterr().err
    assert (
        "\x1b" not in said
        and "niw seed 0: round 2/2" in said
        and "fedavg seed 0: global accuracy" in said
    )  # lines for a log


def test_an_unknown_logger_is_refused_before_training(monkeypatch, tmp_path, capsys):
    assert (
        command(monkeypatch, "train", *FLAGS, "--out", tmp_path / "x", "--log", "tensorbored") == 2
    )
    assert "did you mean 'tensorboard'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


def test_scalars_are_flat():
    assert loggers.scalars({"a": 1, "b": [2.0, 3.0], "c": {"d": 4}, "e": "x", "f": True}) == {
        "a": 1,
        "b/0": 2.0,
        "b/1": 3.0,
        "c/d": 4,
    }


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


def test_loggers_are_told_what_is_spent_of_privacy(tmp_path):
    pytest.importorskip("dp_accounting")
    chosen = settings(dp_noise=1.0, rounds=2)
    train(chosen, tmp_path / "x", progress=False, callbacks=loggers.make(["csv"], tmp_path / "x"))
    records = [json.loads(line) for line in (tmp_path / "x/rounds.jsonl").read_text().splitlines()]
    assert [float(row["epsilon"]) for row in lines_of(tmp_path / "x/log.csv")] == [
        record["epsilon"] for record in records
    ]


def test_a_callback_of_no_class_of_ours_may_lack_what_it_does_not_need(tmp_path):
    class Counts:
        rounds = 0

        def on_round(self, record, state):
            self.rounds += 1

    counts = Counts()
    train(settings(rounds=2), tmp_path / "x", progress=False, callbacks=[counts])
    assert counts.rounds == 2 and isinstance(loggers.CsvLog(tmp_path), fedhb.Callback)
