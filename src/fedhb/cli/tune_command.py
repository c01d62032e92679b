"""The command `fedhb tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedhb.cli.options import JobsOption, names_in

if TYPE_CHECKING:
    from fedhb.runs.tune import Tuned

SpaceArgument = Annotated[
    Path, typer.Argument(metavar="SPACE.toml", help="what is tried: experiments/tuning/space.toml")
]
AlgorithmsOption = Annotated[
    str | None, typer.Option(help="only these, with commas between them [all of the space]")
]
TrialsOption = Annotated[int | None, typer.Option(help="of every method [as in the space]")]


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    def tune(
        space: SpaceArgument,
        algorithms: AlgorithmsOption = None,
        trials: TrialsOption = None,
        jobs: JobsOption = 1,
    ) -> None:
        """Choose every method's settings on validation data, with the same budget for all.

        The choice goes to chosen.toml, beside the space.
        """
        from fedhb.runs.progress import JobProgress
        from fedhb.runs.settings import read_chosen, read_toml
        from fedhb.runs.tune import differences, write_chosen
        from fedhb.runs.tune import tune as run_trials
        from fedhb.runs.tuning_space import Space

        chosen = space.parent / "chosen.toml"
        content = Space.read(space, trials)
        if chosen.exists():
            read_chosen(chosen)  # before hours of work, not after
        progress = JobProgress("tuning", errors)
        methods = names_in("algorithms", algorithms) or content.methods
        try:
            results = run_trials(content, methods, jobs, progress)
        except KeyboardInterrupt:
            errors.print("\nstopped; the same command goes on where it was")
            raise
        finally:
            progress.close()
        write_chosen(chosen, results, content.own_data)
        console.print(table(results))
        console.print(
            f"chosen settings in {chosen}; compare with them: {content.comparison(chosen)}",
            highlight=False,
            soft_wrap=True,
        )
        if not content.own_data:
            for text in differences(read_toml(chosen)):
                console.print(
                    f"not the default of the code yet: {text}", highlight=False, markup=False
                )


def table(results: Sequence[Tuned]) -> Table:
    """Return a table with a row for each method."""
    percent = all(tuned.metric == "accuracy" for tuned in results)
    title = "validation score, in %" if percent else "validation NLL"
    shown = Table(
        "method", "default", "best", "chosen instead of the default", "trials", title=title
    )
    for tuned in results:
        changes = ", ".join(f"{name}={value}" for name, value in tuned.changed.items())
        scores = [
            f"{100 * value:.2f}" if percent else f"{value:.3f}"
            for value in (tuned.default, tuned.best)
        ]
        shown.add_row(tuned.method, *scores, changes or "the default", str(tuned.trials))
    return shown
