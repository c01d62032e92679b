"""Algorithms are trained alike, whatever values of their own the registry has."""

from __future__ import annotations

import pytest

from fedhb.algorithms import ALGORITHMS


@pytest.fixture(autouse=True)
def one_plan_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No algorithm has a learning rate, or another value of training, of its own."""
    for cls in ALGORITHMS.values():
        monkeypatch.setattr(cls, "training", {})
