"""Numbers and lists in words, and text as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["data_size", "duration", "escape", "listed", "number", "plural"]

FEW = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
)


def plural(count: int, word: str, words: str | None = None, spelled: bool = False) -> str:
    """A number of things."""
    text = FEW[count] if spelled and count < len(FEW) else f"{count:,}".replace(",", "\u202f")
    return f"{text} {word if count == 1 else words or word + 's'}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def duration(seconds: float) -> str:
    """A time as a person would say it."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def data_size(count: float) -> str:
    """Bytes with a fitting unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: Any) -> str:
    """A number as short as it stays right."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
