"""The commands `fedhb data`, `fedhb data get` and `fedhb data make`."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhb.errors import InputError
from fedhb.progress_bars import ProgressBars


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the commands."""
    commands = typer.Typer(
        help="Which data sets are here, what is missing and how to get it.",
        invoke_without_command=True,
    )
    app.add_typer(commands, name="data")

    @commands.callback()
    def status(context: typer.Context) -> None:
        """List the data sets: which are here, what is missing and how to get it."""
        if context.invoked_subcommand is not None:
            return
        from fedhb.data import locate, status

        table = Table("data set", "here", "where, or how to get it")
        for entry in status():
            about = (
                entry.where
                if entry.present
                else f"missing {locate.listed(entry.missing)}\n{entry.remedy}"
            )
            table.add_row(entry.name, "yes" if entry.present else "no", escape(about))
        console.print(table)
        console.print(
            "your own data: --data FILE.npz with x, y, and optionally client and split",
            highlight=False,
        )

    @commands.command()
    def get(name: Annotated[str, typer.Argument(help="the data set")]) -> None:
        """Download a data set into the user's cache folder, with its checksum verified."""
        from fedhb.data import load

        dataset = load(name, download=True)
        console.print(
            f"{name}: {len(dataset.train)} training and {len(dataset.test)} test examples",
            highlight=False,
            markup=False,
        )

    @commands.command()
    def make(
        name: Annotated[str, typer.Argument(help="cifar-100-c")],
        jobs: Annotated[int | None, typer.Option(min=1, help="processes [one a core]")] = None,
    ) -> None:
        """Make CIFAR-100-C from the CIFAR-100 test images.

        When it is stopped, the same command goes on.
        """
        from fedhb.data import cifar_c, locate

        if name != cifar_c.NAME:
            raise InputError(
                f"{name!r} cannot be made: only {cifar_c.NAME} can; see `fedhb data` for the others"
            )
        progress = CorruptionProgress(errors)
        try:
            folder = cifar_c.make(jobs or os.cpu_count() or 1, progress.tell)
        except KeyboardInterrupt:
            errors.print("\nstopped; the same command goes on where it was")
            raise
        finally:
            progress.close()
        console.print(
            f"{name} is in {folder}; check it with: sha256sum -c {locate.SUMS}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )


class CorruptionProgress:
    """A bar over all images; without a terminal, a line for each corruption that is done."""

    def __init__(self, console: Console):
        self._console = console
        self._bars = ProgressBars(console)
        self._done: dict[str, int] = {}

    def tell(self, name: str, more: int, total: int) -> None:
        """Count `more` images of the corruption `name` as done; `total` are those of all."""
        from fedhb.data.corruptions import CORRUPTIONS

        self._done[name] = self._done.get(name, 0) + more
        done = sum(self._done.values())
        self._bars.show("images", done, total, label=name)
        if not self._bars.visible and self._done[name] == total // len(CORRUPTIONS):
            self._console.print(
                f"{name}: done, {done} of {total} images", highlight=False, markup=False
            )

    def close(self) -> None:
        """Take the bar away."""
        self._bars.close()
