"""The events of a federation, and its status."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("flwr")

from fedhb.flower.journal import Journal


def test_an_event_is_a_line_that_names_who_and_when(tmp_path):
    journal = Journal(tmp_path / "out")
    journal.note("refused", "'m' holds NaN", round_number=3, client=2, key="ab")
    journal.note("lost", "no answer")
    lines = (tmp_path / "out/events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records == journal.events and [r["round"] for r in records] == [3, 0]
    assert {"event": "refused", "client": 2, "key": "ab"}.items() <= records[0].items()
    assert records[0]["time"].endswith("+00:00")


def test_the_status_is_the_last_one(tmp_path):
    journal = Journal(tmp_path)
    journal.stand("training")
    journal.stand("failed", "too few answers")
    status = json.loads((tmp_path / "status.json").read_text())
    assert status == {"state": "failed", "detail": "too few answers", "pid": os.getpid()}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None)
    journal.note("lost", "no answer")
    journal.stand("done")
    assert not list(tmp_path.iterdir()) and len(journal.events) == 1
