"""Checks of arrays of numbers: they refuse unusable values, and warn of values that look wrong."""

from __future__ import annotations

import warnings

import numpy as np

from fedhb.errors import InputError


def check_finite(x: np.ndarray, subject: str) -> None:
    """Check that all values are finite numbers in float32.

    Args:
        x: the values, one row per example.
        subject: the words for them in the message, which names the first row that is refused.
    """
    if x.dtype.kind not in "iubf":
        raise InputError(f"{subject} have type {x.dtype}: give numbers")
    if x.dtype.kind == "f" and x.size:
        fine = (np.abs(x) <= np.finfo(np.float32).max).reshape(len(x), -1)
        bad = ~fine.all(axis=1)
        if bad.any():
            row = int(bad.argmax())
            where = f"row {row}, column {int(fine[row].argmin())}" if x.ndim == 2 else f"row {row}"
            raise InputError(
                f"{subject}: {where} holds NaN or infinity: remove or impute such rows "
                f"({bad.sum()} in all)"
            )


def check_digits(x: np.ndarray, subject: str) -> None:
    """Warn of columns of a table that lose digits in float32, in which inputs are used.

    For example 1.7e9 and 1.7e9 + 60 are the same number in float32.
    """
    if x.ndim != 2 or x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 or x.dtype == np.float32:
        return
    for k in range(x.shape[1]):
        column = x[:, k].astype(np.float64)
        lost = np.abs(column - column.astype(np.float32)).max(initial=0.0)
        deviation = column.std() if len(column) else 0.0
        if lost > 0.01 * deviation > 0 or (lost > 0 and x.dtype.kind != "f"):
            warnings.warn(
                f"column {k} of the {subject} is used with seven digits and loses the others: it "
                f"deviates by {deviation:.3g} around {column.mean():.10g}; subtract that mean "
                "first, or count from 0",
                stacklevel=4,
            )
