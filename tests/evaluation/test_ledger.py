"""Metrics of clients that are evaluated already."""

from __future__ import annotations

from dataclasses import replace

from builders import clients

from fedhb.evaluation.ledger import Ledger, mark_of

METRICS = [{"accuracy": 0.5}, {"accuracy": 0.25}]


def test_what_is_kept_is_found_again_by_the_same_clients(tmp_path):
    who = clients()
    ledger = Ledger(tmp_path / "l.jsonl", ["about"], who, "test")
    assert not ledger.begun
    ledger.keep([0, 1], METRICS)
    again = Ledger(tmp_path / "l.jsonl", ["about"], who, "test")
    assert again.begun and again.find([0, 1]) == METRICS
    assert again.find([1, 0]) is None and again.find([0]) is None


def test_a_line_that_was_cut_or_changed_is_passed_over(tmp_path):
    who, path = clients(), tmp_path / "l.jsonl"
    ledger = Ledger(path, ["about"], who, "test")
    ledger.keep([0, 1], METRICS)
    ledger.keep([2], METRICS[:1])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], lines[1].replace(b"0.25", b"0.75"), lines[2][:-9]]))
    assert not Ledger(path, ["about"], who, "test").begun
    ledger.keep([3], METRICS[:1])  # on a line of its own, whatever the crash left
    assert Ledger(path, ["about"], who, "test").find([3]) == METRICS[:1]


def test_the_mark_depends_on_all_that_the_numbers_depend_on():
    who = clients()
    moved = replace(who, test=replace(who.test, x=who.test.x + 1))
    marks = {
        mark_of(["about"], who, "test"),
        mark_of(["else"], who, "test"),
        mark_of(["about"], who, "train"),
        mark_of(["about"], moved, "test"),
        mark_of(["about"], who.select([0, 1]), "test"),
    }
    assert len(marks) == 5 and mark_of(["about"], clients(), "test") in marks
