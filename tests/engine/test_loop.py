"""The round loop: callbacks, and the state after a round."""

from __future__ import annotations

from typing import Any

import finished
from fitted import fit

import fedhb
from fedhb.runs import loggers
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings


def test_callbacks_are_told_of_every_round():
    told: list[Any] = []

    class Note:
        def on_start(self, done: int, rounds: int) -> None:
            told.append(("start", done, rounds))

        def on_round(self, record: dict[str, Any], state: Any) -> None:
            record["mine"] = 2 * record["round"]
            told.append(("round", record["round"], state.done))

        def on_end(self) -> None:
            told.append("end")

    run = fit(callbacks=[Note()])
    assert told == [("start", 0, 3), ("round", 1, 1), ("round", 2, 2), ("round", 3, 3), "end"]
    assert [record["mine"] for record in run.records] == [2, 4, 6]


def settings(**more):
    return Settings.resolve(
        finished.SMALL | {"model": {"name": "mlp", "hidden": 16}} | more, {"algorithm": "mixture"}
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


def test_a_callback_of_no_class_of_ours_may_lack_what_it_does_not_need(tmp_path):
    class Counts:
        rounds = 0

        def on_round(self, record, state):
            self.rounds += 1

    counts = Counts()
    train(settings(rounds=2), tmp_path / "x", progress=False, callbacks=[counts])
    assert counts.rounds == 2 and isinstance(loggers.CsvLog(tmp_path), fedhb.Callback)
