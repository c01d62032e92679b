"""Records whose settings have changed since: how tables show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def star(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the mark of numbers that come from a stale record, or nothing."""
    return "*" if any(record.get("stale") for record in records) else ""


def on_one_grid(records: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Return the records whose results were taken at the places of a valid one, or the newest.

    The places are in the result, under this name. Results at other places have no mean with these.
    """
    valid = [record for record in records if not record.get("stale")]
    grid = next((record["result"].get(name) for record in (*valid, *reversed(records))), None)
    return [record for record in records if record["result"].get(name) == grid]
