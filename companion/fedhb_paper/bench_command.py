"""The command `fedhb bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhb.errors import InputError
from fedhb.files import as_json, write_atomically
from fedhb.progress_bars import ProgressBars

Works = Annotated[
    list[str] | None, typer.Argument(metavar="[W1 W2 W3 W4]", help="which reference work [all]")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="write the results there too")
]
Repeats = Annotated[
    int | None, typer.Option(help="timed rounds of every contender [each work's own number]")
]
Full = Annotated[
    bool, typer.Option("--full", help="W2 with all of its images, not a fifth of them scaled")
]


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    def bench(
        works: Works = None, json_file: JsonFile = None, repeats: Repeats = None, full: Full = False
    ) -> None:
        """Measure this machine's speed and memory on reference work.

        fedhb runs beside plain PyTorch, a hand-written limit and Flower.
        """
        from fedhb_paper.bench import check_names, run, tables

        names = check_names(works or ())  # at once: what follows imports torch and takes minutes
        if json_file is not None and not json_file.parent.is_dir():
            raise InputError(
                f"--json {json_file}: there is no folder {json_file.parent}: make it first"
            )
        bars = ProgressBars(errors)
        try:
            results = run(
                names,
                repeats,
                full,
                lambda work, share, text: bars.show(
                    work, round(100 * share), 100, label=f"{work}: {text}"
                ),
            )
        finally:
            bars.close()
        for table in tables(results):
            console.print(table)
        if json_file is not None:
            write_atomically(json_file, as_json(results))
            console.print(f"results in {json_file}", highlight=False, markup=False)
