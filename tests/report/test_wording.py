"""Numbers and lists in words."""

from __future__ import annotations

import pytest

from fedhb.report.wording import data_size, duration, listed, number, plural


@pytest.mark.parametrize(
    ("seconds", "text"), [(89.96, "90.0 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_a_duration_has_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (1000, "1 kB"), (1.5e6, "1.5 MB"), (2.345e9, "2.35 GB")]
)
def test_a_size_has_the_unit_that_fits(count, text):
    assert data_size(count) == text


def test_one_thing_is_no_plural_and_thousands_are_set_apart():
    assert plural(1, "client") == "1 client" and plural(0, "class", "classes") == "0 classes"
    assert plural(3, "seed", spelled=True) == "three seeds"
    assert plural(14, "seed", spelled=True) == "14 seeds"
    assert plural(12345, "step") == "12\u202f345 steps"


def test_a_list_ends_with_and():
    assert [listed(names) for names in ((), "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]


def test_a_number_is_short():
    assert [number(value) for value in (0.1 + 0.2, 3, "niw")] == ["0.3", "3", "niw"]
