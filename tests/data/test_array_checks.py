"""Checks of arrays of numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fedhb.data.array_checks import check_digits, check_finite
from fedhb.errors import InputError


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_the_first_value_that_float32_cannot_hold_is_named(value):
    x = np.zeros((5, 3))
    x[2, 1] = x[4, 0] = value
    with pytest.raises(InputError, match=r"(?s)(?=.*inputs)(?=.*row 2)(?=.*column 1)(?=.*\b2\b)"):
        check_finite(x, "inputs")


def test_the_largest_number_of_float32_is_finite():
    check_finite(np.array([[np.finfo(np.float32).max, -np.finfo(np.float32).max]]), "inputs")
    check_finite(np.zeros((0, 3)), "inputs")


@pytest.mark.parametrize("x", [np.array(["a"]), np.array([None]), np.array([1j])])
def test_what_is_no_number_is_refused_by_its_type(x):
    with pytest.raises(InputError, match=str(x.dtype)):
        check_finite(x, "targets")


def test_digits_that_are_lost_are_warned_of_where_they_tell_rows_apart():
    seconds = 1.7e9 + 60.0 * np.arange(20)
    with pytest.warns(UserWarning, match="column 1"):
        check_digits(np.stack([np.arange(20.0), seconds], axis=1), "inputs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_digits((seconds - 1.7e9)[:, None], "inputs")
        check_digits(seconds[:, None].astype(np.float32), "inputs")
        check_digits(seconds, "targets")
