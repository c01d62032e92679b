"""The command `fedhb train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedhb.cli.options import (
    LogOption,
    SetOption,
    TunedOption,
    note,
    note_untuned,
    with_settings,
)
from fedhb.cli.result_tables import show_result
from fedhb.runs.settings import Settings, check_tables, read_chosen


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    @with_settings
    def train(
        flags: dict[str, Any],
        settings: Annotated[
            Path | None,
            typer.Argument(metavar="[SETTINGS.toml]", help="a settings file; flags override it"),
        ] = None,
        set_: SetOption = None,
        out: Annotated[
            Path | None,
            typer.Option(help="folder for results [runs/DATASET-ALGORITHM-seedN]"),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="go on where the run in --out stopped")
        ] = False,
        log: LogOption = None,
        tuned: TunedOption = None,
    ) -> None:
        """Train a global posterior; evaluate it before and after personalisation."""
        choices = read_chosen(tuned) if tuned else {}
        chosen = Settings.resolve(settings, flags, set_ or (), tuned=choices)
        check_tables(chosen, set_ or ())
        note_untuned(errors, tuned, choices, [chosen])
        folder = out or Path("runs") / f"{chosen.title}-{chosen.algorithm}-seed{chosen.seed}"
        from fedhb.runs import from_settings
        from fedhb.runs.loggers import make

        try:
            run = from_settings.train(
                chosen,
                folder,
                resume,
                callbacks=make(log or (), folder),
                flags=flags,
                say=lambda text: note(errors, text),
            )
        except KeyboardInterrupt:
            again = f"[bold]--out {escape(str(folder))} --resume[/bold]"
            errors.print(f"\nstopped; go on with the same command and {again}")
            raise
        show_result(console, run.result)
        console.print(
            f"results in {folder}; a page of them: fedhb report {folder}",
            highlight=False,
            markup=False,
        )
