"""The command `fedhb paper`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedhb.cli.options import JobsOption, names_in, numbers_in
from fedhb.errors import InputError
from fedhb_paper.markdown import as_markdown

if TYPE_CHECKING:
    from fedhb.runs.records import Inventory, Key
    from fedhb_paper.experiments import Experiment
    from fedhb_paper.scale import Scale

NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="a table or figure; without it, the list of them"),
]
DatasetOption = Annotated[
    list[str] | None, typer.Option(help="only cells with this data set; may be repeated")
]
CellOption = Annotated[
    list[str] | None,
    typer.Option(help="only this cell, by its name or parts: s=100,tau=1; may be repeated"),
]
AlgorithmsOption = Annotated[
    str | None, typer.Option(help="only these algorithms or variants, with commas between them")
]
SeedsOption = Annotated[
    str | None,
    typer.Option(help="these seeds instead of the experiment's own, with commas between them"),
]
WidthOption = Annotated[
    float | None,
    typer.Option(
        help="multiplies the channels of the network [1]; other widths have records of their own"
    ),
]
RoundsOption = Annotated[
    float | None,
    typer.Option(help="the share of each cell's rounds [1]; others have records of their own"),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="the folder of the experiments [experiments, from here upward]"),
]
ShowOption = Annotated[
    bool, typer.Option("--show", help="print the tables from the records, run nothing")
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="run what is recorded a second time, and compare")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown")]


@dataclass(frozen=True)
class Request:
    """The records that a command line asks for.

    Attributes:
        folder: the folder of the experiments.
        name: the experiment.
        datasets, cells, algorithms: names to choose from it; everything where there are none.
        seeds: instead of the experiment's own; None for these.
        scale: the scale of the cells; None where the command line says nothing of it.
    """

    folder: Path
    name: str
    datasets: Sequence[str]
    cells: Sequence[str]
    algorithms: Sequence[str]
    seeds: Sequence[int] | None
    scale: Scale | None

    def experiment(self) -> Experiment:
        """Return the experiment with the seeds that are asked for."""
        from fedhb_paper import experiments

        experiment = experiments.load(self.folder, self.name)
        return experiment if self.seeds is None else experiment.with_seeds(self.seeds)

    def scaled(self) -> Experiment:
        """Return the experiment with these seeds at this scale."""
        experiment = self.experiment()
        if self.scale is None or not self.scale.changes:
            return experiment
        return experiment.scaled([self.scale])

    def keys(self, experiment: Experiment) -> list[Key]:
        """Return the keys of an experiment that are asked for."""
        from fedhb_paper import experiments

        return experiments.choose(experiment, self.datasets, self.cells, self.algorithms)


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the command."""

    @app.command()
    def paper(
        name: NameArgument = None,
        dataset: DatasetOption = None,
        cell: CellOption = None,
        algorithms: AlgorithmsOption = None,
        seeds: SeedsOption = None,
        width: WidthOption = None,
        rounds: RoundsOption = None,
        jobs: JobsOption = 1,
        folder: FolderOption = None,
        show: ShowOption = False,
        again: AgainOption = False,
        markdown: MarkdownOption = False,
    ) -> None:
        """Run a table or figure of the paper again, and print it beside the printed numbers.

        What is recorded already is not run.
        """
        from fedhb_paper import experiments
        from fedhb_paper.scale import Scale

        if show and again:
            raise InputError(
                "--show runs nothing, --again runs what is recorded a second time: choose one"
            )
        place = experiments.find_folder(folder)
        if name is None:
            console.print(overview(place))
            return
        asks_scale = width is not None or rounds is not None
        request = Request(
            place,
            name,
            dataset or (),
            cell or (),
            names_in("algorithms", algorithms),
            None if seeds is None else numbers_in("seeds", seeds),
            Scale(1.0 if width is None else width, 1.0 if rounds is None else rounds)
            if asks_scale
            else None,
        )
        if again:
            run_again(request, jobs, console, errors)
            return
        experiment, inventory = run_missing(request, 0 if show else jobs, errors)
        console.print(f"[bold]{experiment.title}[/bold]", highlight=False)
        for table in tables(experiment, inventory):
            if markdown:
                console.print(as_markdown(table), highlight=False, markup=False, soft_wrap=True)
            else:
                console.print(table)
        if inventory.stale:
            console.print("* by settings that have changed since")
        draw(experiments.load(place, name), errors)


def run_missing(request: Request, jobs: int, errors: Console) -> tuple[Experiment, Inventory]:
    """Run what has no record, in so many processes (0: run nothing).

    Returns:
        The experiment and its records; where no scale is asked for, also those at other scales.
    """
    from fedhb_paper import workbench
    from fedhb_paper.scale import parse

    experiment = request.scaled()
    keys = request.keys(experiment)
    inventory = workbench.standing(experiment, keys)
    done = f"{len(keys) - len(inventory.missing)} of {len(keys)} records are there"
    errors.print(
        f"{request.name}: {done}{stale_words(inventory)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if jobs and inventory.missing:
        inventory = run_all(experiment, keys, jobs, errors)
    if request.scale is not None or not experiment.recorded_scales():
        return experiment, inventory
    experiment = request.experiment().with_recorded_scales()
    of_all_seeds = experiment if request.seeds is not None else experiment.with_recorded_seeds()
    others = [key for key in request.keys(of_all_seeds) if parse(key["cell"])[1].changes]
    recorded = workbench.standing(experiment, others).records
    keys = [*keys, *(record["key"] for record in recorded)]
    return experiment, workbench.standing(experiment, keys)


def run_again(request: Request, jobs: int, console: Console, errors: Console) -> None:
    """Run what is recorded a second time, and print how the results differ."""
    from fedhb_paper import workbench
    from fedhb_paper.run_again import differences, second

    experiment = request.scaled()
    recorded = workbench.standing(experiment, request.keys(experiment)).records
    valid = [record for record in recorded if not record["stale"]]
    if not valid:
        raise InputError(
            f"{request.name}: nothing of this is recorded by the present settings: "
            "leave out --again"
        )
    keys = [record["key"] for record in valid]
    repeated = run_all(second(experiment, keys), keys, jobs, errors).records
    console.print(differences(valid, repeated))
    console.print(
        f"{len(recorded) - len(valid)} records by other settings were left out",
        highlight=False,
        markup=False,
    )


def run_all(experiment: Experiment, keys: Sequence[Key], jobs: int, errors: Console) -> Inventory:
    """Run what is missing of these keys, with progress."""
    from fedhb.runs.progress import JobProgress
    from fedhb_paper import workbench

    progress = JobProgress(experiment.name, errors)
    try:
        return workbench.complete(experiment, keys, jobs, progress)
    except KeyboardInterrupt:
        errors.print("\nstopped; the same command goes on where it was")
        raise
    finally:
        progress.close()


def tables(experiment: Experiment, inventory: Inventory) -> list[Table]:
    """Return the tables of an experiment, of these records."""
    printed = printed_rows(experiment.printed(), inventory.keys)
    return list(experiment.kind.tables(experiment.settings, printed, inventory.records))


def printed_rows(printed: Sequence[dict[str, Any]], keys: Sequence[Key]) -> list[dict[str, Any]]:
    """Return the printed numbers of these keys' cells and variants, at every scale of a cell."""
    from fedhb_paper.scale import parse

    cells = dict.fromkeys(str(key.get("cell")) for key in keys)
    variants = {key.get("variant") for key in keys}
    return [
        {**row, "cell": cell}
        for cell in cells
        for row in printed
        if row["cell"] == parse(cell)[0] and row["algorithm"] in variants
    ]


def draw(experiment: Experiment, errors: Console) -> None:
    """Write the figures of all records, at every scale, to the experiment's folder."""
    from fedhb_paper import experiments, workbench
    from fedhb_paper.drawing import draw_all

    if not hasattr(experiment.kind, "figures"):
        return
    experiment = experiment.with_recorded_scales()
    inventory = workbench.standing(experiment, experiments.choose(experiment))
    figures = experiment.kind.figures(experiment.settings, experiment.printed(), inventory.records)
    folder = experiment.path / "figures"
    try:
        paths = draw_all(figures, folder)
    except InputError as error:  # the tables are there all the same
        errors.print(str(error), highlight=False, markup=False)
        return
    if paths:
        errors.print(
            f"{len(paths)} figures in {folder}", highlight=False, soft_wrap=True, markup=False
        )


def overview(folder: Path) -> Table:
    """Return a table of all experiments: what each is, and how many records there are of it."""
    from fedhb_paper import experiments

    table = Table("name", "what it is", "records", title=f"fedhb paper NAME; folder {folder}")
    for name in experiments.names(folder):
        experiment = experiments.load(folder, name)
        try:
            count, notes = _status(experiment)
        except InputError as error:
            count, notes = "", [str(error)]
        dim = [f"[dim]{note}[/dim]" for note in notes]
        table.add_row(name, "\n".join([experiment.title, *dim]), count)
    return table


def _status(experiment: Experiment) -> tuple[str, list[str]]:
    """Return how many records there are; and the data sets that lack, and other scales."""
    from fedhb_paper import experiments, workbench

    keys = experiments.choose(experiment)
    inventory = workbench.standing(experiment, keys)
    count = f"{len(keys) - len(inventory.missing)} of {len(keys)}{stale_words(inventory)}"
    absent = workbench.lacking(inventory.settings.values(), remedies=False)
    notes = [f"needs {name}: {remedy}" for name, remedy in absent.items()]
    for scale in experiment.recorded_scales():
        changes = ", ".join(f"{key} {value:g}" for key, value in scale.changes.items())
        notes.append(f"also recorded: {changes}")
    return count, notes


def stale_words(inventory: Inventory) -> str:
    """Return how many records are stale, and why; nothing where none is."""
    if not inventory.stale:
        return ""
    names = sorted({name for record in inventory.stale for name in record["stale"]})
    return f"; {len(inventory.stale)} stale, because {', '.join(names)} changed: they are run anew"
