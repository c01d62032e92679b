"""Regression at the learning rates of classification: what `gain` and `most` of the likelihood do.

    python -m experiments.regression.study

From the repository's root; ten minutes of one core. Twelve clients of 8 to 400 examples with 5 features, linear with an offset of
each client's own, or bent; noise small and large. Prints a line per setting: RMSE, NLL and coverage of global and personalised
predictions, the mean of two seeds, on validation rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import statistics
import warnings

import numpy as np

import fedhb
from fedhb.errors import DivergedError
from fedhb.network.factory import default_likelihood
from fedhb.network.vectors import Network

SIZES = (8, 10, 15, 25, 40, 60, 80, 120, 160, 220, 300, 400)
LIKELIHOODS = {
    "plain": {"gain": 1.0, "most": None},
    "held": {"gain": 1.0, "most": 5.0},
    "gain 0.3": {"gain": 0.3, "most": 5.0},
    "gain 0.2": {"gain": 0.2, "most": 5.0},
    "gain 0.1": {"gain": 0.1, "most": 5.0},
}
METRICS = [
    (task, metric) for task in ("global", "personalised") for metric in ("rmse", "nll", "coverage")
]


def clients(bent: bool, noise: float, seed: int) -> fedhb.Clients:
    """Related functions, each client's with an offset of its own; 300 rows each to validate on."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=5)
    pairs = []
    for size in SIZES:
        offset = rng.normal()
        for count in (size, 300):
            x = rng.normal(size=(count, 5))
            mean = 2 * np.sin(2 * x[:, 0]) + (x @ weights) * x[:, 1] if bent else x @ weights
            pairs.append((x, mean + offset + rng.normal(0, noise, count)))
    return fedhb.Clients.from_arrays(pairs[::2], pairs[1::2], standardise=True)


def main() -> None:
    """Every setting."""
    warnings.simplefilter("ignore")
    for bent, noise, batch_size in itertools.product((False, True), (0.05, 0.5), (50, 20)):
        for algorithm in (fedhb.FedAvg(), fedhb.EmpiricalBayes()):
            for name, options in LIKELIHOODS.items():
                found = []
                for seed in (100, 101):
                    who, net = clients(bent, noise, seed), fedhb.nets.mlp((5,), 2)
                    plain = default_likelihood(who, Network(net))
                    likelihood = dataclasses.replace(plain, **options)  # type: ignore[type-var]
                    training = {
                        "rounds": 60,
                        "fraction": 0.5,
                        "batch_size": batch_size,
                        "seed": seed,
                        "workers": 1,
                    }
                    with (
                        contextlib.redirect_stderr(io.StringIO()),
                        contextlib.suppress(DivergedError),
                    ):
                        run = fedhb.fit(net, who, algorithm, likelihood=likelihood, **training)  # type: ignore[arg-type]
                        found.append([run.result[task][metric] for task, metric in METRICS])
                about = f"{'bent' if bent else 'linear'} noise {noise} batch {batch_size} {algorithm.name} {name}"
                means = [f"{statistics.fmean(column):.2f}" for column in zip(*found, strict=True)]
                print(
                    f"{about}: {' '.join(means)}{'' if len(found) == 2 else f' ({2 - len(found)} diverged)'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
