"""The command `fedhb compare`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedhb.cli.options import (
    LogOption,
    SetOption,
    TunedOption,
    note,
    note_untuned,
    with_settings,
)
from fedhb.cli.result_tables import NOTHING, comparison_table, one_line
from fedhb.errors import DivergedError, InputError
from fedhb.runs.settings import ALGORITHMS, Settings, check_tables, read_chosen, read_toml
from fedhb.settings_fields import did_you_mean

LISTS = {"algorithms": "empirical-bayes,mixture,fedavg", "seeds": "0,1,2"}
"""The settings of a comparison, and their defaults."""


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    @with_settings
    def compare(
        flags: dict[str, Any],
        settings: Annotated[
            Path | None,
            typer.Argument(
                metavar="[SETTINGS.toml]",
                help="a settings file, which may have algorithms and seeds; flags override it; the "
                "algorithm and seed of a single run, as in the file that a run keeps, are not used",
            ),
        ] = None,
        algorithms: Annotated[
            str | None,
            typer.Option(
                help="names with commas between them, or all [empirical-bayes,mixture,fedavg]"
            ),
        ] = None,
        seeds: Annotated[
            str | None, typer.Option(help="numbers with commas between them [0,1,2]")
        ] = None,
        set_: SetOption = None,
        out: Annotated[Path, typer.Option(help="folder for the runs")] = Path("runs/compare"),
        resume: Annotated[
            bool, typer.Option("--resume", help="keep what is done, go on with the rest")
        ] = False,
        log: LogOption = None,
        tuned: TunedOption = None,
    ) -> None:
        """Train several algorithms with several seeds; print means and deviations in a table."""
        content = read_toml(settings) if settings else {}
        names = algorithm_names(_listed("algorithms", algorithms, content))
        numbers = seed_numbers(_listed("seeds", seeds, content))
        choices = read_chosen(tuned) if tuned else {}

        def resolve(flags: dict[str, Any]) -> Settings:
            return Settings.resolve(settings, flags, set_ or (), tuple(LISTS), choices)

        runs = {name: resolve(flags | {"algorithm": name}) for name in names}
        check_tables(runs[names[0]], set_ or (), names)
        note_untuned(errors, tuned, choices, list(runs.values()))
        from fedhb.engine.loop import Callback
        from fedhb.runs import comparison
        from fedhb.runs.loggers import make
        from fedhb.runs.progress import RunTable

        make(log or (), out)  # a wrong name should not cost the first run
        labels = [f"{name} seed {seed}" for seed in numbers for name in runs]
        live = RunTable(labels, errors) if errors.is_terminal else None

        class Shown(comparison.Listener):
            """Shows the runs in a live table, or a line for each that is done."""

            def callbacks(self, algorithm: str, seed: int, folder: Path) -> list[Callback]:
                rows = [live.callback(f"{algorithm} seed {seed}")] if live else []
                return [*make(log or (), folder), *rows]

            def on_result(self, result: dict[str, Any]) -> None:
                if live:
                    live.finish(f"{result['algorithm']} seed {result['seed']}", result)
                else:
                    errors.print(one_line(result), soft_wrap=True, highlight=False)

        try:
            with live or contextlib.nullcontext():
                rows, diverged = comparison.compare(
                    runs, numbers, out, resume, Shown(), progress=live is None, flags=flags
                )
        except KeyboardInterrupt:
            errors.print("\nstopped; go on with the same command and [bold]--resume[/bold]")
            raise
        for run, why in diverged.items():
            note(errors, f"{run}: {why}")
        if not rows:
            raise DivergedError("every run diverged: lower the learning rate (--lr)")
        first = next(iter(runs.values()))
        title = (
            f"{first.title}, {first.training.rounds} rounds, seeds "
            f"{','.join(map(str, numbers))}, {first.evaluation.split} data"
        )
        console.print(comparison_table(rows, title))
        if "global" not in rows[0]:
            console.print(NOTHING)
        console.print(
            f"runs in {out}; a page of them: fedhb report {out}", highlight=False, markup=False
        )
        if diverged:
            raise DivergedError(
                f"{len(diverged)} of {len(labels)} runs diverged, and have no part in the means"
            )


def _listed(key: str, given: str | None, content: dict[str, Any]) -> str:
    """Return the text of a list: the flag's, else the file's, else the default."""
    value = content.get(key, LISTS[key]) if given is None else given
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def algorithm_names(text: str) -> list[str]:
    """Return the algorithms that a text names with commas between them, or all."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if text == "all":
        return list(ALGORITHMS)
    if not names:
        raise InputError(f"algorithms={text!r}: name at least one, or all")
    for name in names:
        if name not in ALGORITHMS:
            raise InputError(
                f"unknown algorithm {name!r}{did_you_mean(name, ALGORITHMS)}: choose from "
                f"{', '.join(ALGORITHMS)}, or all"
            )
    return names


def seed_numbers(text: str) -> list[int]:
    """Return the seeds that a text lists with commas between them."""
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError(
            f"seeds={text!r}: give whole numbers with commas between them, such as 0,1,2"
        ) from None
