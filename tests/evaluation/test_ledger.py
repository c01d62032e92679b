"""Metrics of clients that are evaluated already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import clients

from fedhb.evaluation.ledger import Ledger, evaluated_hash
from fedhb.training.plan import Plan

METRICS = [{"accuracy": 0.5}, {"accuracy": 0.25}]


def test_what_is_kept_is_found_again_by_the_same_clients(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl", "mark")
    assert not ledger.holds_some
    ledger.keep([0, 1], METRICS)
    again = Ledger(tmp_path / "l.jsonl", "mark")
    assert again.holds_some and again.find([0, 1]) == METRICS
    assert again.find([1, 0]) is None and again.find([0]) is None
    assert not Ledger(tmp_path / "l.jsonl", "other").holds_some


def test_a_line_that_was_cut_or_changed_is_passed_over(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path, "mark")
    ledger.keep([0, 1], METRICS)
    ledger.keep([2], METRICS[:1])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], lines[1].replace(b"0.25", b"0.75"), lines[2][:-9]]))
    assert not Ledger(path, "mark").holds_some
    ledger.keep([3], METRICS[:1])  # on a line of its own, whatever the crash left
    assert Ledger(path, "mark").find([3]) == METRICS[:1]


def test_the_hash_depends_on_all_that_the_numbers_depend_on():
    who, plan, x = clients(), Plan(2, 4, 0.1, 0.9, True), np.zeros((2, 3))
    moved = replace(who, test=replace(who.test, x=who.test.x + 1))
    hashes = {
        evaluated_hash("run", plan, "test", [who]),
        evaluated_hash("other", plan, "test", [who]),
        evaluated_hash("run", replace(plan, lr=0.2), "test", [who]),
        evaluated_hash("run", plan, "train", [who]),
        evaluated_hash("run", plan, "test", [moved]),
        evaluated_hash("run", plan, "test", [who.select([0, 1])]),
        evaluated_hash("run", plan, "test", [who, moved]),
        evaluated_hash("run", plan, "test", [who], ("zeros", x)),
        evaluated_hash("run", plan, "test", [who], ("ones", x)),
        evaluated_hash("run", plan, "test", [who], ("zeros", x + 1)),
        evaluated_hash("run", plan, ""),
    }
    assert len(hashes) == 11 and evaluated_hash("run", plan, "test", [clients()]) in hashes
