"""The commands `fedhb paper`, `fedhb bench` and `fedhb tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from fedhb.errors import InputError

Words = list[str] | None
Text = str | None
Place = Path | None
Jobs = Annotated[
    int, typer.Option(min=1, help="processes, each with one thread and a run of its own")
]


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the commands of the companion."""

    @app.command()
    def paper(
        name: Annotated[
            Text,
            typer.Argument(
                metavar="[NAME]", help="a table or figure; without it, the list of them"
            ),
        ] = None,
        dataset: Annotated[
            Words, typer.Option(help="only cells with this data set; may be repeated")
        ] = None,
        cell: Annotated[
            Words,
            typer.Option(help="only this cell, by its name or parts: s=100,tau=1; may be repeated"),
        ] = None,
        algorithms: Annotated[
            Text, typer.Option(help="only these algorithms or variants, with commas between them")
        ] = None,
        seeds: Annotated[
            Text,
            typer.Option(
                help="these seeds instead of the experiment's own, with commas between them"
            ),
        ] = None,
        width: Annotated[
            float | None,
            typer.Option(
                help="multiplies the channels of the network [1]; other widths have records of their own"
            ),
        ] = None,
        rounds: Annotated[
            float | None,
            typer.Option(
                help="the share of each cell's rounds [1]; others have records of their own"
            ),
        ] = None,
        jobs: Jobs = 1,
        folder: Annotated[
            Place,
            typer.Option(help="the folder of the experiments [experiments, from here upward]"),
        ] = None,
        show: Annotated[
            bool, typer.Option("--show", help="print the tables from the records, run nothing")
        ] = False,
        again: Annotated[
            bool, typer.Option("--again", help="run what is recorded a second time, and compare")
        ] = False,
        markdown: Annotated[
            bool, typer.Option("--markdown", help="print the tables as Markdown")
        ] = False,
    ) -> None:
        """Run a table or figure of the paper again: what is not recorded yet; ours beside the printed numbers."""
        from fedhb_paper import experiments, workbench
        from fedhb_paper.run_again import differences, second
        from fedhb_paper.scale import Scale, parse

        if show and again:
            raise InputError(
                "--show runs nothing, --again runs what is recorded a second time: choose one"
            )
        place = experiments.find_folder(folder)
        if name is None:
            console.print(overview(place))
            return
        experiment = experiments.load(place, name)
        if seeds is not None:
            experiment = experiment.with_seeds(whole_numbers(seeds))
        asked = dataset or (), cell or (), words(algorithms)
        scale = Scale(1.0 if width is None else width, 1.0 if rounds is None else rounds)
        scales = experiment.recorded_scales() if width is None and rounds is None else []
        shown = experiment.with_recorded_scales()
        experiment = experiment.scaled([scale]) if scale.changes else experiment
        keys = experiments.choose(experiment, *asked)
        standing = workbench.standing(experiment, keys)
        if again:
            valid = [record for record in standing.records if not record["stale"]]
            if not valid:
                raise InputError(
                    f"{name}: nothing of this is recorded by the present settings: leave out --again"
                )
            keys = [record["key"] for record in valid]
            console.print(
                differences(valid, run_all(second(experiment, keys), keys, jobs, errors).records)
            )
            console.print(
                f"{len(standing.records) - len(valid)} records by other settings were left out",
                highlight=False,
                markup=False,
            )
            return
        done = f"{len(keys) - len(standing.missing)} of {len(keys)} records are there"
        errors.print(
            f"{name}: {done}{stale_words(standing)}", highlight=False, markup=False, soft_wrap=True
        )
        if not show and standing.missing:
            standing = run_all(experiment, keys, jobs, errors)
        if scales:  # where none is asked for, what is recorded at others is shown beside it
            others = experiments.choose(
                shown if seeds is not None else shown.with_recorded_seeds(), *asked
            )
            beside = workbench.standing(
                shown, [key for key in others if parse(key["cell"])[1].changes]
            )
            experiment, keys = shown, [*keys, *(record["key"] for record in beside.records)]
            standing = workbench.standing(experiment, keys)
        console.print(f"[bold]{experiment.title}[/bold]", highlight=False)
        for table in experiment.kind.tables(
            experiment.settings, chosen_rows(experiment.printed(), keys), standing.records
        ):
            if markdown:
                console.print(as_markdown(table), highlight=False, markup=False, soft_wrap=True)
            else:
                console.print(table)
        if standing.stale:
            console.print("* by settings that have changed since")
        draw(experiments.load(place, name), errors)

    @app.command()
    def tune(
        space: Annotated[
            Path,
            typer.Argument(
                metavar="SPACE.toml", help="what is tried: experiments/tuning/space.toml"
            ),
        ],
        algorithms: Annotated[
            Text, typer.Option(help="only these, with commas between them [all of the space]")
        ] = None,
        trials: Annotated[
            int | None, typer.Option(help="of every method [as in the space]")
        ] = None,
        jobs: Jobs = 1,
    ) -> None:
        """Choose every method's settings on validation data, with the same budget for all; the choice goes to chosen.toml."""
        from fedhb.runs.settings import read_chosen, read_toml
        from fedhb_paper import tune as tuning
        from fedhb_paper.job_progress import Shown

        chosen = space.parent / "chosen.toml"
        content = tuning.Space.read(space, trials)
        if chosen.exists():
            read_chosen(chosen)  # before hours of work, not after
        shown = Shown("tuning", errors)
        try:
            found = tuning.tune(content, words(algorithms) or content.methods, jobs, shown)
        except KeyboardInterrupt:
            errors.print("\nstopped; the same command goes on where it was")
            raise
        finally:
            shown.close()
        tuning.write_chosen(chosen, found, content.own_data)
        console.print(tuning.table(found))
        console.print(
            f"chosen settings in {chosen}; compare with them: {content.comparison(chosen)}",
            highlight=False,
            soft_wrap=True,
        )
        if not content.own_data:
            for text in tuning.differences(read_toml(chosen)):
                console.print(
                    f"not the default of the code yet: {text}", highlight=False, markup=False
                )

    @app.command()
    def bench(
        works: Annotated[
            list[str] | None,
            typer.Argument(metavar="[W1 W2 W3 W4]", help="which reference work [all]"),
        ] = None,
        json_file: Annotated[
            Path | None,
            typer.Option("--json", metavar="FILE", help="write the results there too"),
        ] = None,
        repeats: Annotated[
            int | None,
            typer.Option(help="timed rounds of every contender [each work's own number]"),
        ] = None,
        full: Annotated[
            bool,
            typer.Option("--full", help="W2 with all of its images, not a fifth of them scaled"),
        ] = False,
    ) -> None:
        """Measure this machine's speed and memory on reference work: fedhb beside plain PyTorch, a hand-written limit and Flower."""
        from rich.progress import Progress

        from fedhb.files import as_json, write_atomically
        from fedhb_paper.bench import check_names, tables
        from fedhb_paper.bench import run as run_benchmark

        names = check_names(works or ())  # at once: what follows imports torch and takes minutes
        if json_file is not None and not json_file.parent.is_dir():
            raise InputError(
                f"--json {json_file}: there is no folder {json_file.parent}: make it first"
            )
        with Progress(*Progress.get_default_columns(), console=errors, transient=True) as bar:
            rows: dict[str, Any] = {}

            def tell(work: str, share: float, what: str) -> None:
                if work not in rows:
                    rows.update({work: bar.add_task(work, total=1.0)})
                bar.update(rows[work], completed=share, description=f"{work}: {what}")

            results = run_benchmark(names, repeats, full, tell)
        for table in tables(results):
            console.print(table)
        if json_file is not None:
            write_atomically(json_file, as_json(results))
            console.print(f"results in {json_file}", highlight=False, markup=False)


def overview(folder: Path) -> Table:
    """Every experiment, what it is, and how many of its records are there."""
    from fedhb_paper import experiments, workbench

    table = Table("name", "what it is", "records", title=f"fedhb paper NAME; folder {folder}")
    for name in experiments.names(folder):
        experiment = experiments.load(folder, name)
        try:
            keys = experiments.choose(experiment)
            standing = workbench.standing(experiment, keys)
            count = f"{len(keys) - len(standing.missing)} of {len(keys)}{stale_words(standing)}"
            scales = [
                ", ".join(f"{key} {value:g}" for key, value in s.changes.items())
                for s in experiment.recorded_scales()
            ]
            absent = workbench.lacking(list(standing.settings.values()), remedies=False)
            notes = [f"needs {name}: {why}" for name, why in absent.items()] + [
                f"also recorded: {text}" for text in scales
            ]
        except InputError as error:
            count, notes = "", [str(error)]
        table.add_row(
            name, "\n".join([experiment.title, *(f"[dim]{note}[/dim]" for note in notes)]), count
        )
    return table


def as_markdown(table: Table) -> str:
    """A table for a document: its title, header and rows, and what is said below it."""

    def line(cells: Any) -> str:
        return (
            "| "
            + " | ".join(
                Styled.from_markup(str(cell)).plain.replace("\n", "<br>").replace("|", "\\|")
                for cell in cells
            )
            + " |"
        )

    sides = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = [line(cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]
    head = (
        [f"**{Styled.from_markup(str(table.title)).plain}**".replace("\n", ", "), ""]
        if table.title
        else []
    )
    tail = ["", Styled.from_markup(str(table.caption)).plain] if table.caption else []
    return "\n".join(
        [
            *head,
            line(column.header for column in table.columns),
            "| " + " | ".join(sides) + " |",
            *rows,
            *tail,
            "",
        ]
    )


def run_all(experiment: Any, keys: Any, jobs: int, errors: Console) -> Any:
    """Run what is missing, with progress."""
    from fedhb_paper import workbench
    from fedhb_paper.job_progress import Shown

    shown = Shown(experiment.name, errors)
    try:
        return workbench.complete(experiment, keys, jobs, shown)
    except KeyboardInterrupt:
        errors.print("\nstopped; the same command goes on where it was")
        raise
    finally:
        shown.close()


def draw(experiment: Any, errors: Console) -> None:
    """Write the figures of all its records, of whatever width, to its folder, as PNG and SVG."""
    from fedhb_paper import experiments, workbench
    from fedhb_paper.drawing import draw_all

    if not hasattr(experiment.kind, "figures"):
        return
    experiment = experiment.with_recorded_scales()
    standing = workbench.standing(experiment, experiments.choose(experiment))
    figures = experiment.kind.figures(experiment.settings, experiment.printed(), standing.records)
    try:
        paths = draw_all(figures, experiment.path / "figures")
    except InputError as error:  # the tables are there all the same
        errors.print(str(error), highlight=False, markup=False)
        return
    if paths:
        errors.print(
            f"{len(paths)} figures in {experiment.path / 'figures'}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )


def chosen_rows(printed: list[dict[str, Any]], keys: Any) -> list[dict[str, Any]]:
    """The printed numbers of these keys' cells, whatever their scale, and variants."""
    from fedhb_paper.scale import parse

    cells, variants = (
        dict.fromkeys(str(key.get("cell")) for key in keys),
        {key.get("variant") for key in keys},
    )
    return [
        {**row, "cell": cell}
        for cell in cells
        for row in printed
        if row["cell"] == parse(cell)[0] and row["algorithm"] in variants
    ]


def stale_words(standing: Any) -> str:
    """How many records are stale, and why."""
    if not standing.stale:
        return ""
    names = sorted({name for record in standing.stale for name in record["stale"]})
    return f"; {len(standing.stale)} stale, because {', '.join(names)} changed: they are run anew"


def words(text: str | None) -> list[str]:
    """Names with commas between them, none where the option is not given; given, it must name something, else all would run."""
    found = [word.strip() for word in (text or "").split(",") if word.strip()]
    if text is not None and not found:
        raise InputError(f"algorithms={text!r}: name at least one, or leave it out for all")
    return found


def whole_numbers(text: str) -> list[int]:
    """Seeds with commas between them."""
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found:
        raise InputError(
            f"seeds={text!r}: give whole numbers with commas between them, such as 0,1,2"
        )
    return found
