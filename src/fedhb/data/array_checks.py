"""Checks of arrays of numbers: what cannot be used is refused, what may not be meant so is warned of."""

from __future__ import annotations

import warnings

import numpy as np

from fedhb.errors import InputError


def check_finite(x: np.ndarray, what: str) -> None:
    """Refuse values that are not finite numbers in float32, as they are used, naming the first row that has one."""
    if x.dtype.kind not in "iubf":
        raise InputError(f"{what} have type {x.dtype}: give numbers")
    if x.dtype.kind == "f" and x.size:
        fine = (np.abs(x) <= np.finfo(np.float32).max).reshape(len(x), -1)
        bad = ~fine.all(axis=1)
        if bad.any():
            row = int(bad.argmax())
            where = f"row {row}, column {int(fine[row].argmin())}" if x.ndim == 2 else f"row {row}"
            raise InputError(
                f"{what}: {where} holds NaN or infinity: remove or impute such rows ({bad.sum()} in all)"
            )


def check_digits(x: np.ndarray, what: str) -> None:
    """Warn of columns of a table that are not what they were in float32, as they are used: 1.7e9 and 1.7e9 + 60 are one."""
    if x.ndim != 2 or x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 or x.dtype == np.float32:
        return
    for k in range(x.shape[1]):
        column = x[:, k].astype(np.float64)
        lost, deviation = (
            np.abs(column - column.astype(np.float32)).max(initial=0.0),
            column.std() if len(column) else 0.0,
        )
        if lost > 0.01 * deviation > 0 or (lost > 0 and x.dtype.kind != "f"):
            warnings.warn(
                f"column {k} of the {what} is used with seven digits, and loses others: it deviates by {deviation:.3g} around "
                f"{column.mean():.10g}; subtract that first, or number what it counts from 0",
                stacklevel=4,
            )
