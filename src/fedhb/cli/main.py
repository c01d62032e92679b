"""The command line: `fedhb train | compare | predict | personalise | report | data | algorithms | bench | paper | tune | deploy`.

Exit codes: 0 done, 2 bad input (a message that names the value and the remedy), 1 failure, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhb.cli import data_commands, deploy_commands, report_command, tune_command
from fedhb.cli.options import LogOption, ModelOption, SetOption, TunedOption, with_settings
from fedhb.cli.result_tables import NOTHING, comparison_table, one_line, show_result
from fedhb.engine import allocator
from fedhb.errors import DivergedError, InputError, Stopped
from fedhb.files import of_file
from fedhb.runs.settings import ALGORITHMS, Settings, own_tables, read_chosen, read_toml, untaken
from fedhb.settings_fields import did_you_mean

app = typer.Typer(
    name="fedhb",
    help="Hierarchical Bayesian federated learning.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # in "rich", the default, [digits] would be a style, and vanish
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

console = Console()
errors = Console(stderr=True, highlight=False)


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
        Path | None, typer.Option(help="folder for results [runs/DATASET-ALGORITHM-seedN]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on where the run in --out stopped")
    ] = False,
    log: LogOption = None,
    tuned: TunedOption = None,
) -> None:
    """Train a global posterior; evaluate it before and after personalisation."""
    found = read_chosen(tuned) if tuned else {}
    chosen = Settings.resolve(settings, flags, set_ or (), tuned=found)
    own_tables(chosen, set_ or ())
    note_untuned(tuned, found, [chosen])
    name = Path(chosen.data).stem if chosen.data else chosen.dataset
    folder = out or Path("runs") / f"{name}-{chosen.algorithm}-seed{chosen.seed}"
    from fedhb.runs.from_settings import train as run_training
    from fedhb.runs.loggers import make

    before = bytes_of(folder / "result.json")
    try:
        run = run_training(
            chosen, folder, resume, callbacks=make(log or (), folder), flags=flags, about=note
        )
    except KeyboardInterrupt:
        errors.print(
            f"\nstopped; go on with the same command and [bold]--out {escape(str(folder))} --resume[/bold]"
        )
        raise
    if before is not None and before == bytes_of(folder / "result.json"):
        console.print(f"{folder} was finished already: nothing to do", markup=False)
    show_result(console, run.result)
    console.print(
        f"results in {folder}; a page of them: fedhb report {folder}", highlight=False, markup=False
    )


@app.command()
@with_settings
def compare(
    flags: dict[str, Any],
    settings: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SETTINGS.toml]",
            help="a settings file, which may have algorithms and seeds; flags override it; the algorithm and seed of a single "
            "run, as in the file that a run keeps, are not used",
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(help="names with commas between them, or all [niw,mixture,fedavg]"),
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
    """Train several algorithms with several seeds under the same settings; one table of means and deviations."""
    lists = {"algorithms": "niw,mixture,fedavg", "seeds": "0,1,2"}
    content = read_toml(settings) if settings else {}
    for key, given in (("algorithms", algorithms), ("seeds", seeds)):
        value = content.get(key, lists[key]) if given is None else given
        lists[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    names = (
        list(ALGORITHMS)
        if lists["algorithms"] == "all"
        else [n.strip() for n in lists["algorithms"].split(",") if n.strip()]
    )
    try:
        numbers = list(dict.fromkeys(int(s) for s in lists["seeds"].split(",")))
    except ValueError:
        raise InputError(
            f"seeds={lists['seeds']!r}: give whole numbers with commas between them, such as 0,1,2"
        ) from None
    ignored = ("algorithms", "seeds")
    if not names:
        raise InputError(f"algorithms={lists['algorithms']!r}: name at least one, or all")
    for name in names:
        if name not in ALGORITHMS:
            raise InputError(
                f"unknown algorithm {name!r}{did_you_mean(name, ALGORITHMS)}: choose from {', '.join(ALGORITHMS)}, or all"
            )
    found = read_chosen(tuned) if tuned else {}
    each = {
        name: Settings.resolve(settings, flags | {"algorithm": name}, set_ or (), ignored, found)
        for name in names
    }
    chosen = Settings.resolve(settings, flags, set_ or (), ignored)
    own_tables(chosen, set_ or (), names)
    note_untuned(tuned, found, list(each.values()))
    from fedhb.runs.comparison import compare as run_comparison
    from fedhb.runs.loggers import make
    from fedhb.runs.progress import RunTable

    make(log or (), out)  # a wrong name should not cost the first run
    labels = [f"{name} seed {seed}" for seed in numbers for name in each]
    shown = RunTable(labels, errors) if errors.is_terminal else None

    def told(name: str, seed: int, folder: Path) -> list[Any]:
        return [
            *make(log or (), folder),
            *([shown.callback(f"{name} seed {seed}")] if shown else []),
        ]

    def finished(result: dict[str, Any]) -> None:
        if shown:
            shown.finish(f"{result['algorithm']} seed {result['seed']}", result)
        else:
            errors.print(one_line(result), soft_wrap=True, highlight=False)

    try:
        with shown or contextlib.nullcontext():
            rows, diverged = run_comparison(
                each, numbers, out, resume, finished, told, progress=shown is None, flags=flags
            )
    except KeyboardInterrupt:
        errors.print("\nstopped; go on with the same command and [bold]--resume[/bold]")
        raise
    for run, why in diverged.items():
        note(f"{run}: {why}")
    if not rows:
        raise DivergedError("every run diverged: lower the learning rate (--lr)")
    name = Path(chosen.data).stem if chosen.data else chosen.dataset
    console.print(
        comparison_table(
            rows,
            f"{name}, {chosen.rounds} rounds, seeds {','.join(map(str, numbers))}, {chosen.evaluate_on} data",
        )
    )
    if "global" not in rows[0]:
        console.print(NOTHING)
    console.print(
        f"runs in {out}; a page of them: fedhb report {out}", highlight=False, markup=False
    )
    if diverged:
        raise DivergedError(
            f"{len(diverged)} of {len(labels)} runs diverged, and have no part in the means"
        )


@app.command()
def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="the folder of a run, or of a personalised model")
    ],
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT.npy", help="inputs [n, ...] in the units of the training data"
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="where to write [INPUT.predictions.npz]")] = None,
    model: ModelOption = None,
) -> None:
    """Predict with a global posterior or a personalised model: probabilities and entropy (regression: mean and deviation)."""
    import numpy as np

    from fedhb.data.table import read_npy
    from fedhb.runs.load import load

    x = read_npy(inputs)  # first: a folder, such as `.`, may have no name to make another of
    if not x.ndim or not len(x):
        raise InputError(f"{inputs} has no rows: give inputs [n, ...] with at least one")
    target = out or inputs.with_suffix(".predictions.npz")
    if target.is_dir() or not target.parent.is_dir():
        wrong = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise InputError(f"--out {target}: {wrong}: give the name of a file to write")
    if target.suffix != ".npz":
        target = target.with_name(f"{target.name}.npz")  # as numpy names it
    trained = load(run, model)
    warn_unfinished(run, trained)
    prediction = trained.predict(x)
    if prediction.ndim == 2:
        entropy = -(prediction * np.log(np.clip(prediction, 1e-38, None))).sum(1)
        write_npz(target, probabilities=prediction, entropy=entropy)
        about = f"mean confidence {prediction.max(1).mean():.3f}, mean entropy {entropy.mean():.3f} nats"
    else:
        mean, deviation = prediction[:, 0], np.sqrt(prediction[:, 1])
        entropy = (0.5 * np.log(2 * np.pi * np.e) + np.log(deviation)).sum(-1)
        write_npz(target, mean=mean, deviation=deviation, entropy=entropy)
        about = f"mean deviation {deviation.mean():.4g}"
    console.print(
        f"{len(prediction)} predictions in {target}; {about}", highlight=False, markup=False
    )


@app.command()
def personalise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    data: Annotated[
        Path,
        typer.Option(
            metavar="MINE.npz", help="your x and y; with `split`, the rows marked 1 test the result"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the personalised model [RUN/personalised/NAME]"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="epochs [as in the run]")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate [as in the run]")] = None,
    model: ModelOption = None,
) -> None:
    """Adapt the global posterior to your own data; the result is a folder that `fedhb predict` takes."""
    import torch

    from fedhb.clients.clients import targets
    from fedhb.data import read_npz
    from fedhb.files import check_unused
    from fedhb.runs.load import load, save_personal
    from fedhb.runs.run import Run

    trained = load(run, model)
    if not isinstance(trained, Run):
        raise InputError(
            f"{run} is a personalised model already: give the folder of the run it came from"
        )
    mine = read_npz(data, test_share=0.0)
    holders = (
        []
        if mine.train.client is None
        else sorted({str(name) for name in mine.train.client.tolist()})
    )
    if len(holders) > 1:
        raise InputError(
            f"{data} holds rows of {len(holders)} clients ({', '.join(holders[:3])}, ...): give those of one"
        )
    warn_unfinished(run, trained)
    folder = out or run / "personalised" / data.stem
    check_unused(folder, "choose another --out")
    if len(mine.test):
        trained.check_targets(
            mine.test.y
        )  # before the model is made: a wrong one should not cost it
    personal = trained.personalise(mine.train.x, mine.train.y, epochs=epochs, lr=lr)
    save_personal(folder, run, personal)
    console.print(
        f"personalised on {len(mine.train)} examples; the model is in {folder}",
        highlight=False,
        markup=False,
    )
    if len(mine.test):
        y, likelihood = targets(mine.test.y), trained.problem.likelihood
        table = Table(
            "",
            *likelihood.metrics(torch.from_numpy(trained.predict(mine.test.x)), y),
            title=f"on your {len(mine.test)} test examples",
        )
        for label, predictor in (("global", trained), ("personalised", personal)):
            metrics = likelihood.metrics(torch.from_numpy(predictor.predict(mine.test.x)), y)
            table.add_row(label, *(f"{v:.4f}" for v in metrics.values()))
        console.print(table)


def write_npz(path: Path, **arrays: Any) -> None:
    """Arrays as a file of numpy's, written whole: what was there before is not lost to a full disk."""
    import numpy as np

    from fedhb.files import write_atomically

    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())


def note(text: str) -> None:
    """Something to know, beside the results."""
    errors.print(escape(text), soft_wrap=True, highlight=False)


def note_untuned(path: Path | None, found: Mapping[str, Any], runs: Sequence[Settings]) -> None:
    """Which algorithms were not tuned with the others, what else counts more, and whether other data were tuned on."""
    if path is None:
        return
    if absent := [run.algorithm for run in runs if run.algorithm not in found]:
        note(f"{path} has nothing of {', '.join(absent)}: defaults are used there")
    if others := dict.fromkeys(
        name for run in runs for name in untaken(found.get(run.algorithm, {}), run)
    ):
        note(
            f"not taken from {path}, because flags or the settings file give it: {', '.join(others)}"
        )

    of = {found[run.algorithm].get("data", "") for run in runs if run.algorithm in found} - {""}
    if any(of_file(runs[0].data) not in one.split(", ") for one in of):
        note(f"{path} was chosen on other data: {', '.join(sorted(of))}")


def warn_unfinished(folder: Path, trained: Any) -> None:
    """A run without a result is used as far as it has come."""
    if not getattr(trained, "result", True):
        note(
            f"{folder} is not finished: this is its model after round {trained.state.done} (train --resume goes on)"
        )


def bytes_of(path: Path) -> bytes | None:
    """What a file holds, if it is there."""
    return path.read_bytes() if path.is_file() else None


@app.command("algorithms")
def list_algorithms() -> None:
    """The algorithms, each with its settings and their defaults."""
    from fedhb.algorithms import ALGORITHMS as CLASSES

    table = Table(
        "algorithm",
        "setting",
        "default",
        "meaning",
        title="settings are given as --set ALGORITHM.SETTING=VALUE",
    )
    for name, cls in CLASSES.items():
        table.add_section()
        table.add_row(
            f"[bold]{name}[/bold]",
            "",
            "",
            f"[bold]{(cls.__doc__ or '').strip().splitlines()[0]}[/bold]",
        )
        for f in dataclasses.fields(cls):
            table.add_row("", f.name, str(f.default), f.metadata.get("help", ""))
    console.print(table)


data_commands.register(app, console, errors)
deploy_commands.register(app, console, errors, partial(show_result, console))
report_command.register(app, console, errors)
tune_command.register(app, console, errors)
for _command in entry_points(
    group="fedhb.commands"
):  # those of the companion package, where it is installed
    _command.load()(app, console, errors)


def main() -> None:
    """Run the command line with its exit codes."""
    allocator.keep()
    terminated: list[int] = []

    def terminate(number: int, frame: Any) -> None:
        terminated.append(number)
        raise KeyboardInterrupt  # as Ctrl-C: the last whole round is kept

    signal.signal(signal.SIGTERM, terminate)
    # Wide tables should not be folded into a log's 80 columns.
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = 160
    try:
        app()
    except InputError as error:
        errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except Stopped as error:
        errors.print(f"[bold red]failed:[/bold red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        errors.print(
            f"[bold red]failed:[/bold red] {escape(what)}. Make room or mend it; a run that was begun goes on with --resume from "
            "its last checkpoint, which is intact",
            soft_wrap=True,
        )
        sys.exit(1)
    except MemoryError:
        errors.print(
            "[bold red]failed:[/bold red] out of memory: use fewer workers, a smaller model or less data",
            soft_wrap=True,
        )
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as ended:
        if (
            isinstance(ended, SystemExit) and ended.code != 130
        ):  # what typer makes of an interruption
            raise
        sys.exit(143 if terminated else 130)


def entry() -> None:
    """The command `fedhb`. After Ctrl-C it ends at once: taking torch down in order can take a second."""
    try:
        main()
    except SystemExit as ended:
        if ended.code in (130, 143):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
