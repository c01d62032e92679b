"""How the settings of three examples were chosen: on a fifth of the clients' own training data, kept back from training.

    python -m experiments.examples.study

From the repository's root; three minutes of one core. Prints a line per point of a small grid: the mean NLL over
three such splits, global and personalised. Test data are not read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import statistics
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "images_from_arrays": {"lr": (0.03, 0.1, 0.2)},
    "third_family": {"lr": (0.03, 0.1, 0.2), "kl_weight": (1e-4, 1e-3, 1e-2)},
    "regression": {"lr": (0.02, 0.05, 0.1), "personal_lr": (3e-3, 1e-2, 3e-2)},
}


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Every point of every grid."""
    for name, grid in GRIDS.items():
        example = load(name)
        made = (
            example.make_clients(np.random.default_rng(1))
            if name == "regression"
            else example.make_clients()
        )
        clients = made[0] if isinstance(made, tuple) else made
        for values in itertools.product(*grid.values()):
            settings, scores = dict(zip(grid, values, strict=True)), []
            for seed in range(3):
                with contextlib.redirect_stderr(io.StringIO()):
                    run = example.train(
                        clients.with_validation(0.2, seed=seed),
                        **settings,
                        evaluate_on="validation",
                    )
                scores.append([run.result[task]["nll"] for task in ("global", "personalised")])
            means = [statistics.fmean(column) for column in zip(*scores, strict=True)]
            print(
                name,
                settings,
                f"NLL global {means[0]:.3f} personalised {means[1]:.3f} sum {sum(means):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
