"""Options that several commands have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhb.errors import InputError
from fedhb.runs.settings import Settings

KINDS = {int: int, float: float, str: str, bool: bool}
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="an algorithm's or the model's own setting, such as niw.kl_weight=0.001",
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="PKG.MOD:FACTORY",
        help="the factory of the run's model, where that is code of your own: it is run",
    ),
]

TunedOption = Annotated[
    Path | None,
    typer.Option(
        metavar="CHOSEN.toml",
        help="what `fedhb tune` chose for each algorithm, in place of its defaults",
    ),
]

LogOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="csv|tensorboard",
        help="every round's numbers to OUT/log.csv or OUT/tensorboard; may be repeated",
    ),
]


JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, help="processes, each with one thread and a run of its own")
]


def names_in(option: str, text: str | None) -> list[str]:
    """Return the names that an option gives with commas between them; none if it is not given.

    An option without any name is refused: it would stand for all of them.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise InputError(f"{option}={text!r}: name at least one, or leave it out for all")
    return names


def numbers_in(option: str, text: str) -> list[int]:
    """Return the whole numbers that an option gives with commas between them."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise InputError(
            f"{option}={text!r}: give whole numbers with commas between them, such as 0,1,2"
        )
    return numbers


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag per setting; those that were given arrive as `flags`.

    A command that takes several of a setting, such as `algorithms`, has no flag for a single one: it could only be ignored.
    """
    own = inspect.signature(command).parameters
    names = [
        f
        for f in dataclasses.fields(Settings)
        if f.name != "options" and not {f.name, f"{f.name}s"} & set(own)
    ]
    hints = inspect.get_annotations(command, eval_str=True)

    def wrapper(**values: Any) -> None:
        flags = {f.name: values.pop(f.name) for f in names}
        command(flags=flags, **values)

    parameters = [p.replace(annotation=hints[n]) for n, p in own.items() if n != "flags"]
    for f in names:
        text = f.metadata["help"] + (f" [{f.default}]" if f.default != "" else "")
        option = typer.Option("--" + f.name.replace("_", "-"), help=text, show_default=False)
        annotation: Any = Annotated[KINDS[type(f.default)] | None, option]
        parameters.append(
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in keyword_only}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper
