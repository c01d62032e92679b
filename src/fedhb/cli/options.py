"""Options that several commands have, and notes that several print."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedhb.errors import InputError
from fedhb.files import of_file
from fedhb.runs.settings import Settings, flat_fields, untaken

KINDS = {int: int, float: float, str: str, bool: bool}
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="an algorithm's or the model's own setting, such as empirical-bayes.kl_weight=0.1",
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
    """Give a command one flag per setting; the values arrive as `flags`, None where not given.

    A command that takes several values of a setting, such as `algorithms`, has no flag for a single
    one: it would have no effect.
    """
    parameters = inspect.signature(command).parameters
    fields = {
        name: about
        for name, (_, about) in flat_fields().items()
        if not {name, f"{name}s"} & set(parameters)
    }
    hints = inspect.get_annotations(command, eval_str=True)

    def wrapper(**values: Any) -> None:
        flags = {name: values.pop(name) for name in fields}
        command(flags=flags, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        parameter.replace(annotation=hints[name], kind=keyword)
        for name, parameter in parameters.items()
        if name != "flags"
    ]
    for name, about in fields.items():
        text = about.metadata["help"] + (f" [{about.default}]" if about.default != "" else "")
        option = typer.Option("--" + name.replace("_", "-"), help=text, show_default=False)
        annotation: Any = Annotated[KINDS[type(about.default)] | None, option]
        options.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in options}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def note(errors: Console, text: str) -> None:
    """Print something to know, beside the results."""
    errors.print(escape(text), soft_wrap=True, highlight=False)


def note_untuned(
    errors: Console, path: Path | None, tuned: Mapping[str, Any], runs: Sequence[Settings]
) -> None:
    """Print which algorithms were not tuned, which values are not taken, and other data.

    Args:
        errors: where it is printed.
        path: of the choices; None for none.
        tuned: the choices for each algorithm.
        runs: the settings of each run.
    """
    if path is None:
        return
    if absent := [run.algorithm for run in runs if run.algorithm not in tuned]:
        note(errors, f"{path} has nothing of {', '.join(absent)}: defaults are used there")
    others = dict.fromkeys(
        name for run in runs for name in untaken(tuned.get(run.algorithm, {}), run)
    )
    if others:
        note(
            errors,
            f"not taken from {path}, because flags or the settings file give it: "
            f"{', '.join(others)}",
        )
    sources = {tuned[run.algorithm].get("data", "") for run in runs if run.algorithm in tuned}
    file = of_file(runs[0].data.file)
    if any(file not in source.split(", ") for source in sources - {""}):
        note(errors, f"{path} was chosen on other data: {', '.join(sorted(sources - {''}))}")
