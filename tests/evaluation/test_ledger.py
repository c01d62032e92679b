"""Metrics of clients that are evaluated already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import clients

from fedhb.evaluation.ledger import Ledger, evaluated_hash
from fedhb.training.plan import Plan

METRICS = [{"accuracy": 0.5}, {"accuracy": 0.25}]


def test_what_is_kept_is_found_again_by_the_same_clients(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl", "a mark")
    assert not ledger.holds_some
    ledger.keep([0, 1], METRICS)
    again = Ledger(tmp_path / "l.jsonl", "a mark")
    assert again.holds_some and again.find([0, 1]) == METRICS
    assert again.find([1, 0]) is None and again.find([0]) is None
    assert not Ledger(tmp_path / "l.jsonl", "another mark").holds_some


def test_a_line_that_was_cut_or_changed_is_passed_over(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path, "a mark")
    ledger.keep([0, 1], METRICS)
    ledger.keep([2], METRICS[:1])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], lines[1].replace(b"0.25", b"0.75"), lines[2][:-9]]))
    assert not Ledger(path, "a mark").holds_some
    ledger.keep([3], METRICS[:1])  # on a line of its own, whatever the crash left
    assert Ledger(path, "a mark").find([3]) == METRICS[:1]


def test_the_mark_depends_on_all_that_the_numbers_depend_on():
    who = clients()
    moved = replace(who, test=replace(who.test, x=who.test.x + 1))
    plan, longer = Plan(2, 4, 0.1, 0.9, True), Plan(3, 4, 0.1, 0.9, True)
    zeros, ones = np.zeros((2, 4)), np.ones((2, 4))
    given = [
        ("trained", plan, "test", [who]),
        ("otherwise", plan, "test", [who]),
        ("trained", longer, "test", [who]),
        ("trained", plan, "train", [who]),
        ("trained", plan, "", [who]),
        ("trained", plan, "test", [moved]),
        ("trained", plan, "test", [who.select([0, 1])]),
        ("trained", plan, "test", [who, who]),
        ("trained", plan, "test", [who], ("zeros", zeros)),
        ("trained", plan, "test", [who], ("ones", zeros)),
        ("trained", plan, "test", [who], ("zeros", ones)),
    ]
    marks = {evaluated_hash(*about) for about in given}
    assert len(marks) == len(given)
    assert evaluated_hash("trained", plan, "test", [clients()]) in marks
