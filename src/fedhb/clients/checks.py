"""Checks of inputs and targets: they refuse unusable values, and warn of values that look wrong."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from fedhb.data.array_checks import check_finite
from fedhb.errors import InputError

if TYPE_CHECKING:
    from fedhb.clients.clients import Clients


MAX_VALUES_OF_CLASSES = 20
"""Real targets with more different values than this are surely no class numbers."""


def check_labels(train: np.ndarray, test: np.ndarray | None, num_classes: int | None) -> int | None:
    """Check that every label lies in 0..num_classes-1, and return the number of classes.

    Args:
        train: the training targets.
        test: the test targets, or None.
        num_classes: the number of classes; None for the largest label plus one.

    Returns:
        The number of classes; None for real targets.
    """
    targets = {
        subject: y
        for subject, y in (("training targets", train), ("test targets", test))
        if y is not None and y.size
    }
    for subject, y in targets.items():
        check_finite(y, subject)
        if (y.dtype.kind == "f") != (train.dtype.kind == "f"):
            raise InputError(
                f"{subject} have type {y.dtype}, training targets {train.dtype}: give labels or "
                "real targets in both"
            )
    if train.dtype.kind == "f":
        return None
    low = min(int(y.min()) for y in targets.values())
    high = max(int(y.max()) for y in targets.values())
    classes = high + 1 if num_classes is None else num_classes
    if low < 0 or high >= classes:
        bound = "0, 1, ..." if num_classes is None else f"0..{classes - 1}"
        raise InputError(
            f"label {low if low < 0 else high} is out of range {bound}: number the classes from 0"
        )
    return classes


def suspect_targets(y: np.ndarray) -> None:
    """Warn of real targets that look like class numbers, and of gaps between class numbers."""
    values = np.unique(y)
    if (
        y.dtype.kind == "f"
        and y.ndim == 1
        and 1 < len(values) <= MAX_VALUES_OF_CLASSES < len(y)
        and (values == values.round()).all()
    ):
        warnings.warn(
            f"the real targets have only {len(values)} different values, all whole numbers, and "
            "are regressed on: if they are classes, give integers, y.astype(int)",
            stacklevel=3,
        )
    if y.dtype.kind in "iub" and len(values) <= int(values[-1]):
        absent = next(k for k, label in enumerate(values.tolist()) if k != label)
        warnings.warn(
            f"no training example has class {absent}, though labels go up to {values[-1]}: number "
            "the classes from 0 without gaps (or, in Python, give num_classes)",
            stacklevel=3,
        )


def check_alike(clients: Clients, others: Clients, kind: str) -> None:
    """Check that other clients have inputs and targets like those of the clients that train.

    Args:
        clients: the clients that train.
        others: the other clients.
        kind: the word for the other clients in messages, such as "holdout".
    """
    shape, other_shape = tuple(clients.train.x.shape[1:]), tuple(others.train.x.shape[1:])
    if shape != other_shape:
        raise InputError(
            f"{kind} clients have inputs of shape {other_shape}, the clients that train {shape}: "
            "make them alike"
        )
    classes, other_classes = clients.num_classes, others.num_classes
    same_targets = clients.train.y.shape[1:] == others.train.y.shape[1:]
    if (classes is None) != (other_classes is None) or not same_targets:
        raise InputError(
            f"{kind} clients have targets of another kind than the clients that train: give both "
            "labels, or both real targets of one shape"
        )
    if classes is not None and other_classes is not None and other_classes > classes:
        raise InputError(
            f"{kind} clients have {other_classes} classes, the clients that train {classes}: give "
            f"num_classes={other_classes} to both"
        )


def refuse_single(clients: Clients) -> None:
    """Refuse clients with one training example: batch norm cannot train on it."""
    single = clients.ids[clients.sizes == 1].tolist()
    if single:
        raise InputError(
            f"client {single[0]} has a single example, and batch norm cannot train on one: leave "
            "it out"
        )
