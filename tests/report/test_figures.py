"""Colours and styles of methods, and means over runs."""

from __future__ import annotations

import pytest

from fedhb.report.figures import COLOURS, mean_and_spread, styles
from fedhb.runs.settings import ALGORITHMS


def test_few_methods_never_share_a_colour():
    for names in (
        ["niw", "fedem", "fedavg"],
        ["local", "centralised", "ensemble", "fedpop"],
        ["mine", "niw"],
    ):
        assert len({style.colour for style in styles(names).values()}) == len(names)


def test_styles_are_the_methods_own():
    all_ = styles(list(ALGORITHMS))
    assert len({(s.colour, s.dash) for s in all_.values()}) == len(ALGORITHMS)
    assert (
        styles(["fedavg"])["fedavg"].colour
        == all_["fedavg"].colour
        == styles(["niw", "fedavg"])["fedavg"].colour
    )


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("ground", ["#ffffff", "#14171b"])
def test_colours_have_contrast_on_both_grounds(colour, ground):
    """WCAG 2.2, 1.4.11: 3 to 1 for what is drawn."""

    def luminance(text):
        parts = [int(text[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(colour), luminance(ground)))
    assert (high + 0.05) / (low + 0.05) >= 3


def test_mean_and_spread_pass_over_what_is_missing():
    assert mean_and_spread([[1.0, None, 3.0], [3.0, 5.0]]) == (
        [2.0, 5.0, 3.0],
        [pytest.approx(2**0.5), None, None],
    )
