"""Numbers for other tools: every round once, also after a resumption."""

from __future__ import annotations

import csv
import json
import pytest
from fedhb.runs import loggers
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings
import fedhb
import finished


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


def test_scalars_are_flat():
    assert loggers.scalars({"a": 1, "b": [2.0, 3.0], "c": {"d": 4}, "e": "x", "f": True}) == {
        "a": 1,
        "b/0": 2.0,
        "b/1": 3.0,
        "c/d": 4,
    }


def test_loggers_are_told_what_is_spent_of_privacy(tmp_path):
    pytest.importorskip("dp_accounting")
    chosen = settings(dp_noise=1.0, rounds=2)
    train(chosen, tmp_path / "x", progress=False, callbacks=loggers.make(["csv"], tmp_path / "x"))
    records = [json.loads(line) for line in (tmp_path / "x/rounds.jsonl").read_text().splitlines()]
    assert [float(row["epsilon"]) for row in lines_of(tmp_path / "x/log.csv")] == [
        record["epsilon"] for record in records
    ]
