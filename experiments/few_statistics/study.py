"""Measure what a personal model with few examples gains where the federation's statistics count too.

They count for few_examples.PRIOR_EXAMPLES (algorithms/empirical_bayes/few_examples.py).

python -m experiments.few_statistics.study
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fedhb
from fedhb.algorithms.empirical_bayes import few_examples

COUNTS, SIZES, REPEATS, TESTED = (0, 3, 10, 30), (2, 3, 5, 10, 20, 50, 200), 12, 400


def hospital(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Patients whose inputs have a mean of their hospital's, and whose risk depends on them by weights around common ones."""
    common = np.random.default_rng(1).normal(size=8)
    centre, own = rng.normal(0, 0.7, 8), rng.normal(size=8)
    x = rng.normal(centre, 1, size=(size, 8)).astype(np.float32)
    risk = (x - centre) @ (common + 0.5 * own) + own[0]
    return x, (rng.random(size) < 1 / (1 + np.exp(-risk))).astype(int)


def main() -> None:
    """Print NLLs of new hospitals: the global model's, and the personal one's for each count."""
    rng = np.random.default_rng(0)
    clients = fedhb.Clients.from_arrays(
        [hospital(rng, int(rng.integers(60, 300))) for _ in range(12)]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    run = fedhb.fit(
        model,
        clients,
        fedhb.EmpiricalBayes(),
        rounds=30,
        fraction=0.5,
        batch_size=20,
        progress=False,
    )
    print("| examples | global | " + " | ".join(str(count) for count in COUNTS) + " |")
    print("|---" * (2 + len(COUNTS)) + "|")
    for n in SIZES:
        found = []
        for _ in range(REPEATS):
            x, y = hospital(rng, n + TESTED)
            predictions = [run.predict(x[n:])]
            for count in COUNTS:
                few_examples.PRIOR_EXAMPLES = count
                predictions.append(run.personalise(x[:n], y[:n]).predict(x[n:]))
            found.append([-np.log(p[np.arange(TESTED), y[n:]]).mean() for p in predictions])
        print(f"| {n} | " + " | ".join(f"{value:.3f}" for value in np.mean(found, axis=0)) + " |")


if __name__ == "__main__":
    main()
