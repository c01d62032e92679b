"""A setting: its default, its words for help, and the values that it may have.

A dataclass declares a setting with `setting(...)`; `bounded` refuses a value outside its bounds,
and `convert` reads a value from text or TOML in the type of the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any

from fedhb.errors import InputError

FILTERS = ("refuse", "clip", "winsorise", "krum")
"""The filters of a defence against hostile clients (answers/defence.py)."""

SCHEDULES = ("step", "constant", "cosine")
"""The schedules of the learning rate (engine/schedule.py)."""

GROUP_SPLITS = ("image", "group")
"""How the partition `groups` chooses test images (clients/partition.py)."""

MOST_COUNT = 10_000
"""The largest whole number among an algorithm's settings: it decides how much is allocated."""


LARGE = 2**53
"""A limit from here on is named only to those who exceed it."""


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may have.

    Attributes:
        choices: the words that it may be; any where empty.
        least, most: the smallest and the largest number.
        below: a number that it must stay below; infinity for any finite number.
        positive: whether it must be above zero.
    """

    choices: Sequence[str] = ()
    least: float | None = None
    most: float | None = None
    below: float | None = None
    positive: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value outside these bounds; `name` is the setting's."""
        if self.choices and value not in self.choices:
            words = " or ".join(word for word in self.choices if word)
            hint = did_you_mean(str(value), self.choices)
            raise InputError(f"{name}={value!r}{hint}: choose {words}")
        if self.positive and not (value > 0 and (self.below is None or value < self.below)):
            raise InputError(f"{name}={value}: give a positive number")
        limits = {"at least": self.least, "at most": self.most, "below": self.below}
        inside = (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        if not inside:
            named = [
                f"{word} {limit}"
                for word, limit in limits.items()
                if limit is not None and (limit < LARGE or not value < limit)
            ]
            raise InputError(f"{name}={value}: give a number of {' and '.join(named)}")


def setting(
    default: Any,
    help: str,
    *,
    flat: str = "",
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    positive: bool = False,
) -> Any:
    """Declare a setting as a field of a dataclass.

    Args:
        default: its value where none is given; all values have its type.
        help: a line for `fedhb algorithms` or `--help`.
        flat: its name in files and among flags, where that is not the field's name.
        choices, least, most, below, positive: its bounds; a whole number is at most MOST_COUNT
            unless `most` says otherwise.
    """
    if type(default) is int and most is None:
        most = MOST_COUNT
    bounds = Bounds(choices, least, most, below, positive)
    return field(default=default, metadata={"help": help, "flat": flat, "bounds": bounds})


def bounded(name: str, value: Any, about: Field[Any]) -> None:
    """Refuse a value that a field made by `setting` may not have."""
    if "bounds" not in about.metadata:
        return
    whole, numeric = type(about.default) is int, isinstance(about.default, (int, float))
    if numeric and not isinstance(value, int if whole else (int, float)):
        raise InputError(f"{name}={value!r}: give a {'whole ' if whole else ''}number")
    about.metadata["bounds"].check(name, value)


def filters(text: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the filters that the setting `defence` names.

    Args:
        text: empty for none, "default", or names with commas between them.
        default: the filters of "default".
    """
    if text == "default":
        return default
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in FILTERS:
            raise InputError(
                f"defence={text!r}: choose default, or from {', '.join(FILTERS)} with commas "
                "between them"
            )
    return names


def convert(name: str, value: Any, default: Any) -> Any:
    """Return a setting's value, which may be text, in the type of its default."""
    kind = type(default)
    try:
        if kind is bool:
            return (
                value
                if isinstance(value, bool)
                else {"true": True, "false": False}[str(value).lower()]
            )
        if isinstance(value, (list, dict)) or (isinstance(value, bool) and kind is not str):
            raise ValueError
        if kind is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        expected = "true or false" if kind is bool else f"a value like {default!r}"
        raise InputError(f"{name}={value!r} is not {expected}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest known word, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
