"""Settings' values: from text or TOML to the type of their default, with errors that name the value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import Field, field
from typing import Any

from fedhb.errors import InputError

FILTERS = ("refuse", "clip", "winsorise", "krum")
"""What a defence against hostile clients can be made of (defence.py)."""


MOST_COUNT = 10_000
"""The largest whole number among an algorithm's settings: they decide what is allocated, when a run is loaded too."""


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    positive: bool = False,
) -> Any:
    """A field of an algorithm: its default, what it means, and which values it may have (`bounded`).

    Args:
        default: its value where none is given; its type is that of all values.
        help: a line for `fedhb algorithms`.
        choices: the words it may be.
        least, most: the numbers it may be, both included; whole ones are at most MOST_COUNT unless `most` says otherwise.
        positive: whether it must be above zero.
    """
    if type(default) is int and most is None:
        most = MOST_COUNT
    return field(
        default=default, metadata={"help": help, "bounds": (choices, least, most, positive)}
    )


def bounded(key: str, value: Any, about: Field[Any]) -> None:
    """Refuse what a field made by `setting` may not be."""
    if "bounds" not in about.metadata:
        return
    choices, least, most, positive = about.metadata["bounds"]
    whole, numeric = type(about.default) is int, isinstance(about.default, (int, float))
    if numeric and not isinstance(value, int if whole else (int, float)):
        raise InputError(f"{key}={value!r}: give a {'whole ' if whole else ''}number")
    if choices and value not in choices:
        raise InputError(f"{key}={value!r}: choose {' or '.join(choices)}")
    if positive and not value > 0:
        raise InputError(f"{key}={value}: give a positive number")
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        limits = [
            f"at {name} {limit}"
            for name, limit in (("least", least), ("most", most))
            if limit is not None
        ]
        raise InputError(f"{key}={value}: give a number of {' and '.join(limits)}")


def filters(text: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The filters that a setting names: none if it is empty, the default ones, or some with commas between them."""
    if text == "default":
        return default
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in FILTERS:
            raise InputError(
                f"defence={text!r}: choose default, or from {', '.join(FILTERS)} with commas between them"
            )
    return names


def convert(key: str, value: Any, default: Any) -> Any:
    """A setting's value, which may come as text, in the type of its default."""
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
        raise InputError(f"{key}={value!r} is not {expected}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the nearest known word."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
