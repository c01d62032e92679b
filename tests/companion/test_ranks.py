"""Ranks and tests against hand-computed values and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedhb_paper import ranks


def test_ranks_by_hand():
    assert ranks.ranks([0.3, 0.9, 0.5]) == [3, 1, 2]
    assert ranks.ranks([1.0, 2.0, 2.0, 0.5]) == [3, 1.5, 1.5, 4]
    assert ranks.ranks([7, 7, 7]) == [2, 2, 2]


def test_friedman_by_hand():
    """Three blocks, three methods: mean ranks 4/3, 5/3, 3, so chi2 = 12*3/12 (16/9 + 25/9 + 9 - 12)
    = 3 * 14/9 = 14/3.
    """
    result = ranks.compare([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.1, 0.2, 0.0]])
    assert result.ranks == pytest.approx([4 / 3, 5 / 3, 3])
    assert result.chi2 == pytest.approx(14 / 3)
    assert result.p == pytest.approx(
        math.exp(-14 / 6)
    )  # the tail of a chi2 with two degrees of freedom
    assert result.critical == pytest.approx(2.343 * math.sqrt(12 / 18))
    assert result.blocks == 3


@pytest.mark.parametrize("rounding", [9, 1])
def test_friedman_is_scipys(rounding):
    scores = np.round(np.random.default_rng(0).random((12, 5)), rounding)  # one digit: many ties
    result = ranks.compare(scores.tolist())
    theirs = stats.friedmanchisquare(*scores.T)
    assert result.chi2 == pytest.approx(theirs.statistic) and result.p == pytest.approx(
        theirs.pvalue
    )
    assert result.ranks == pytest.approx(stats.rankdata(-scores, axis=1).mean(0))


def test_no_difference():
    result = ranks.compare([[1.0, 1.0], [2.0, 2.0]])
    assert (result.chi2, result.p) == (0.0, 1.0)


def test_critical_values_are_those_of_the_studentised_range():
    for k in (2, 3, 10, 13, 20):
        assert ranks.Q[k - 2] == pytest.approx(
            stats.studentized_range.ppf(0.95, k, np.inf) / math.sqrt(2), abs=1e-3
        )
    assert ranks.compare([[float(j) for j in range(21)]] * 2).critical is None
