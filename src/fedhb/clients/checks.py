"""Checks of inputs and targets: what cannot be used is refused, what may not be meant so is warned of."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhb.data.array_checks import check_finite
from fedhb.errors import InputError

if TYPE_CHECKING:
    from fedhb.clients.clients import Clients


def check_labels(train: np.ndarray, test: np.ndarray | None, num_classes: int | None) -> int | None:
    """The number of classes (None for real targets), after a check that every label lies in 0..num_classes-1."""
    given = {
        what: y
        for what, y in (("training targets", train), ("test targets", test))
        if y is not None and y.size
    }
    for what, y in given.items():
        check_finite(y, what)
        if (y.dtype.kind == "f") != (train.dtype.kind == "f"):
            raise InputError(
                f"{what} have type {y.dtype}, training targets {train.dtype}: give labels or real targets in both"
            )
    if train.dtype.kind == "f":
        return None
    low, high = min(int(y.min()) for y in given.values()), max(int(y.max()) for y in given.values())
    classes = high + 1 if num_classes is None else num_classes
    if low < 0 or high >= classes:
        bound = "0, 1, ..." if num_classes is None else f"0..{classes - 1}"
        raise InputError(
            f"label {low if low < 0 else high} is out of range {bound}: number the classes from 0"
        )
    return classes


def suspect_targets(y: np.ndarray) -> None:
    """Warn of training targets that may not be meant as they are understood."""
    found, most = np.unique(y), 20
    if (
        y.dtype.kind == "f"
        and y.ndim == 1
        and 1 < len(found) <= most < len(y)
        and (found == found.round()).all()
    ):
        warnings.warn(
            f"the real targets have only {len(found)} different values, all whole numbers, and are regressed on: if they are "
            "classes, give integers, y.astype(int)",
            stacklevel=3,
        )
    if y.dtype.kind in "iub" and len(found) <= int(found[-1]):
        absent = next(k for k, label in enumerate(found.tolist()) if k != label)
        warnings.warn(
            f"no training example has class {absent}, though labels go up to {found[-1]}: number the classes from 0 without gaps "
            "(in Python, or say how many there are: num_classes)",
            stacklevel=3,
        )


def check_alike(clients: Any, others: Any, what: str) -> None:
    """Refuse clients with other inputs or targets than those that train."""
    mine, theirs = clients.train.x.shape[1:], others.train.x.shape[1:]
    if mine != theirs:
        raise InputError(
            f"{what} clients have inputs of shape {tuple(theirs)}, the others {tuple(mine)}: make them alike"
        )
    if (clients.num_classes is None) != (others.num_classes is None) or clients.train.y.shape[
        1:
    ] != others.train.y.shape[1:]:
        raise InputError(
            f"{what} clients have other targets than the others (labels, or real ones): make them alike"
        )
    if (
        clients.num_classes is not None
        and others.num_classes is not None
        and others.num_classes > clients.num_classes
    ):
        raise InputError(
            f"{what} clients have {others.num_classes} classes, the others {clients.num_classes}: give num_classes="
            f"{others.num_classes} to both"
        )


def refuse_single(clients: Clients) -> None:
    """Refuse a client with one training example where the network has batch norm."""
    alone = clients.ids[clients.sizes == 1].tolist()
    if alone:
        raise InputError(
            f"client {alone[0]} has a single example, and batch norm cannot train on one: leave it out"
        )
