"""The commands `fedhb predict` and `fedhb personalise`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedhb.cli.options import ModelOption, note
from fedhb.errors import InputError
from fedhb.files import check_unused, write_atomically


def register(app: typer.Typer, console: Console, errors: Console) -> None:
    """Add the commands."""

    @app.command()
    def predict(
        run: Annotated[
            Path,
            typer.Argument(metavar="RUN", help="the folder of a run, or of a personalised model"),
        ],
        inputs: Annotated[
            Path,
            typer.Argument(
                metavar="INPUT.npy", help="inputs [n, ...] in the units of the training data"
            ),
        ],
        out: Annotated[
            Path | None, typer.Option(help="where to write [INPUT.predictions.npz]")
        ] = None,
        model: ModelOption = None,
    ) -> None:
        """Predict probabilities and entropy with a run or a personalised model.

        For regression it predicts mean and deviation.
        """
        import numpy as np

        from fedhb.data.table import read_npy
        from fedhb.runs.load import load

        x = read_npy(inputs)  # first: a folder, such as `.`, may have no name for the output
        if not x.ndim or not len(x):
            raise InputError(f"{inputs} has no rows: give inputs [n, ...] with at least one")
        target = out or inputs.with_suffix(".predictions.npz")
        if target.is_dir() or not target.parent.is_dir():
            wrong = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
            raise InputError(f"--out {target}: {wrong}: give the name of a file to write")
        if target.suffix != ".npz":
            target = target.with_name(f"{target.name}.npz")  # as numpy names it
        trained = load(run, model)
        note_unfinished(errors, run, trained)
        prediction = trained.predict(x)
        if prediction.ndim == 2:
            entropy = -(prediction * np.log(np.clip(prediction, 1e-38, None))).sum(1)
            write_npz(target, probabilities=prediction, entropy=entropy)
            confidence = prediction.max(1).mean()
            about = f"mean confidence {confidence:.3f}, mean entropy {entropy.mean():.3f} nats"
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
                metavar="MINE.npz",
                help="your x and y; with `split`, the rows marked 1 test the result",
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
        """Adapt the global posterior to your own data; `fedhb predict` takes the result."""
        from fedhb.data import read_table
        from fedhb.runs.load import load, save_personal
        from fedhb.runs.run import Run

        trained = load(run, model)
        if not isinstance(trained, Run):
            raise InputError(
                f"{run} is a personalised model already: give the folder of the run it came from"
            )
        dataset = read_table(data, test_share=0.0)
        client = dataset.train.client
        owners = [] if client is None else sorted({str(name) for name in client.tolist()})
        if len(owners) > 1:
            raise InputError(
                f"{data} holds rows of {len(owners)} clients ({', '.join(owners[:3])}, ...): give "
                "those of one"
            )
        note_unfinished(errors, run, trained)
        folder = out or run / "personalised" / data.stem
        check_unused(folder, "choose another --out")
        if len(dataset.test):  # before the model is made: a wrong target should not cost it
            trained.check_targets(dataset.test.y)
        personal = trained.personalise(dataset.train.x, dataset.train.y, epochs=epochs, lr=lr)
        save_personal(folder, run, personal)
        console.print(
            f"personalised on {len(dataset.train)} examples; the model is in {folder}",
            highlight=False,
            markup=False,
        )
        if len(dataset.test):
            console.print(metrics_table(dataset.test, trained, personal))


def metrics_table(test: Any, trained: Any, personal: Any) -> Table:
    """Return the metrics of a run and of a personal model on test examples."""
    import torch

    from fedhb.clients.clients import targets

    rows = {
        label: trained.problem.likelihood.metrics(
            torch.from_numpy(predictor.predict(test.x)), targets(test.y)
        )
        for label, predictor in (("global", trained), ("personalised", personal))
    }
    table = Table("", *rows["global"], title=f"on your {len(test)} test examples")
    for label, metrics in rows.items():
        table.add_row(label, *(f"{value:.4f}" for value in metrics.values()))
    return table


def write_npz(path: Path, **arrays: Any) -> None:
    """Write arrays as a file of numpy's, whole or not at all."""
    import numpy as np

    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())


def note_unfinished(errors: Console, folder: Path, trained: Any) -> None:
    """Print that a run without a result is used as far as it has come."""
    if not getattr(trained, "result", True):
        note(
            errors,
            f"{folder} is not finished: this is its model after round {trained.state.done} (train "
            "--resume goes on)",
        )
