"""Plots as plain data."""

from __future__ import annotations

from fedhb.report.plots import thinned


def test_thinned_keeps_both_ends():
    for count in (1, 5, 640, 641, 10_000):
        kept = thinned(count)
        assert kept[0] == 0 and kept[-1] == count - 1 and len(kept) <= 641
    assert thinned(0) == []
