"""The commands that the companion adds to `fedhb`: `fedhb paper` and `fedhb bench`."""

from __future__ import annotations

import typer
from rich.console import Console

from fedhb_paper import bench_command, paper_command


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the commands; the library calls this by the entry point in pyproject.toml."""
    paper_command.register(app, console, errors)
    bench_command.register(app, console, errors)
