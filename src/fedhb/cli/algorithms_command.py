"""The command `fedhb algorithms`."""

from __future__ import annotations

import dataclasses

import typer
from rich.console import Console
from rich.table import Table


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    def algorithms() -> None:
        """List the algorithms, each with its settings and their defaults."""
        from fedhb.algorithms import ALGORITHMS

        title = "settings are given as --set ALGORITHM.SETTING=VALUE"
        table = Table("algorithm", "setting", "default", "meaning", title=title)
        for name, cls in ALGORITHMS.items():
            summary = (cls.__doc__ or "").strip().splitlines()[0]
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]", "", "", f"[bold]{summary}[/bold]")
            for f in dataclasses.fields(cls):
                table.add_row("", f.name, str(f.default), f.metadata.get("help", ""))
        console.print(table)
