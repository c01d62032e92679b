"""Plots of uncertainty from what evaluations recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedhb.report.figures import Style
from fedhb.report.uncertainty_section import plots, records, reliability

BINS = {"count": [9, 20, 12], "right": [9, 10, 9], "confidence": [8.1, 12.0, 10.8]}
RECORDED = {"uncertainty": {"global": {"reliability": BINS}}}


def method(*evaluations: dict[str, Any] | None) -> Any:
    runs = [SimpleNamespace(evaluation=evaluation) for evaluation in evaluations]
    return SimpleNamespace(name="niw", runs=runs, first=runs[0], style=Style("#000000"))


def test_runs_without_a_record_are_passed_over():
    several = method(None, {}, {"uncertainty": {}}, RECORDED)
    assert records(several, "global", "reliability") == [BINS]
    assert plots([method(None)]) == []


def test_bins_with_fewer_than_ten_examples_of_all_seeds_are_left_out():
    shown = {}
    for seeds in (1, 2):
        plot = reliability([method(*[RECORDED] * seeds)], "global")
        assert plot is not None
        (line,) = plot["series"]
        shown[seeds] = (line["x"], line["y"])
    assert shown == {1: ([0.6, 0.9], [0.5, 0.75]), 2: ([0.9, 0.6, 0.9], [1.0, 0.5, 0.75])}


def test_too_much_confidence_is_said_in_points():
    """30.9 confident for 28 right, of 41."""
    plot = reliability([method(RECORDED)], "global")
    assert plot is not None and "7.1" in plot["alt"] and "niw" in plot["alt"]
