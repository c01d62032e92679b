"""Numbers and lists in words, and text as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["data_size", "duration", "escape", "listed", "number", "plural"]

SPELLED = (
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
    """Write a number of things, such as "3 clients"; `words` is the plural of `word`."""
    if spelled and count < len(SPELLED):
        text = SPELLED[count]
    else:
        text = f"{count:,}".replace(",", "\u202f")
    return f"{text} {word if count == 1 else words or word + 's'}"


def listed(names: Sequence[str]) -> str:
    """Write a list as "a, b and c"."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def data_size(count: float) -> str:
    """Write a number of bytes in B, kB, MB or GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: Any) -> str:
    """Write a number with at most four digits, or another value as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
