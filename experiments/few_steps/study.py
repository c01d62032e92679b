"""Measure what the personal prior gains from gradients where clients take few steps in a round.

The prior is that of algorithms/empirical_bayes/few_steps.py; the data are for validation.

    FEDHB_DATA=... python -m experiments.few_steps.study

From the repository's root; a quarter of an hour of one core. The same examples in fewer and fewer hands: 48, 96 and 240 of
Fashion-MNIST for training each, one, two and five steps of 50; 51, whose second batch is one example; then 48 and 51 drawn alike
for all clients.
"""

from __future__ import annotations

import statistics

from fedhb import data
from fedhb.algorithms.empirical_bayes import few_steps
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings

FEW, SEEDS = few_steps.FEW, (100, 101)
CELLS = {
    "1 step": {"num_clients": 1000, "fraction": 0.02},
    "2 steps": {"num_clients": 500, "fraction": 0.02},
    "5 steps": {"num_clients": 200, "fraction": 0.05},
    "a short second": {"num_clients": 941, "fraction": 0.02},
    "1 step, all clients alike": {"num_clients": 1000, "fraction": 0.02, "partition": "iid"},
    "a short second, all clients alike": {"num_clients": 941, "fraction": 0.02, "partition": "iid"},
}
METHODS = {
    "empirical-bayes by scatter alone": ("empirical-bayes", 0),
    "empirical-bayes": ("empirical-bayes", FEW),
    "fedavg": ("fedavg", FEW),
}


def main() -> None:
    """Print a line for each cell: personalised accuracy and NLL of each method, means over the seeds."""
    dataset = data.load("fashion-mnist")
    print("| | " + " | ".join(METHODS) + " |")
    print("|---" * (1 + len(METHODS)) + "|")
    for cell, own in CELLS.items():
        texts = []
        for algorithm, few in METHODS.values():
            few_steps.FEW = few
            content = {
                "dataset": "fashion-mnist",
                "algorithm": algorithm,
                "rounds": 60,
                "validation": 0.2,
                **own,
            }
            found = []
            for seed in SEEDS:
                settings = Settings.resolve(
                    content | {"evaluate_on": "validation", "seed": seed, "workers": 1}, {}
                )
                found.append(
                    train(settings, None, dataset=dataset, progress=False).result["personalised"]
                )
            means = [
                statistics.fmean(one[metric] for one in found) for metric in ("accuracy", "nll")
            ]
            texts.append(f"{100 * means[0]:.1f}, {means[1]:.3f}")
        print(f"| {cell} | " + " | ".join(texts) + " |", flush=True)


if __name__ == "__main__":
    main()
