"""The command `fedhb report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhb.errors import InputError


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    def report(
        runs: Annotated[
            list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or of a comparison")
        ],
        out: Annotated[
            Path | None, typer.Option(metavar="PAGE.html", help="the page [RUN/report.html]")
        ] = None,
    ) -> None:
        """Write one HTML page about runs: results, curves, clients, uncertainty, posterior.

        It opens from disk. For one folder the page is inside it; for several it is ./report.html,
        unless --out names another.
        """
        for path in runs:
            if not path.is_dir():
                raise InputError(
                    f"{path}: there is no such folder: give that of a run or of a comparison"
                )
        target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
        if target.is_dir() or not target.parent.is_dir():
            raise InputError(
                f"--out {target}: give the name of a file in a folder that exists, such as "
                "page.html"
            )
        with errors.status("importing") as status:
            from fedhb.report.page import write

            methods = write(runs, target, lambda text: status.update(text))
        count = sum(len(method.runs) for method in methods)
        size = target.stat().st_size / 1e6
        console.print(
            f"{target}: {count} run{'s' if count > 1 else ''}, {size:.1f} MB; open it in a browser",
            highlight=False,
            markup=False,
        )
