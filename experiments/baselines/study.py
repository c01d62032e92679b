"""How the baselines' defaults were chosen, and what they give: Fashion-MNIST, 100 clients, 5 shards, f = 0.1, 100 rounds.

    python -m experiments.baselines.study validation     # every variant, on validation data, seeds 100 and 101
    python -m experiments.baselines.study test           # all algorithms at their defaults, on test data, seeds 0 to 2

From the repository's root. A record per run goes to VALIDATION.jsonl or TEST.jsonl beside this file; runs that are recorded are
not run again. The table of the records is printed at the end. Needs Fashion-MNIST (`fedhb data get fashion-mnist`); half a
minute to two of one core per run.

A FedPop client that took part predicts with its own heads, so its global number is a personal one. Its variants hold out 20
clients that never train; among those the global predictions of all algorithms are alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.records import study

from fedhb.runs.settings import ALGORITHMS

NOVEL = "holdout_clients=20"
SERVER = "server_share=0.1"
DIGITS = [["dataset=digits", "num_clients=100"], ["dataset=digits", "num_clients=20"]]

VARIANTS: dict[str, list[list[str]]] = {
    "validation": [
        *[["fedpa", f"fedpa.burn_in={share}", "fedpa.warm_up=0"] for share in (0.2, 0.5, 0.8)],
        ["fedpa", "fedpa.burn_in=0.5", "fedpa.warm_up=25"],
        *[["fedbe", SERVER, f"fedbe.server_lr={lr}"] for lr in (1e-4, 1e-3)],
        *[["fedpop", NOVEL, f"fedpop.prior_scale={scale}"] for scale in (0.01, 0.03, 0.1, 0.3)],
        *[[name, *setting] for setting in DIGITS for name in ("fedbabu", "local")],
        *[
            ["pfedbayes", *setting, f"pfedbayes.zeta={zeta}"]
            for setting in DIGITS
            for zeta in (0.1, 1.0, 10.0)
        ],
        *[["pfedbayes", f"pfedbayes.zeta={zeta}"] for zeta in (0.1, 1.0)],
    ],
    "test": [
        *[[name] for name in ALGORITHMS],
        ["fedbe", SERVER],
        *[[name, NOVEL] for name in ("fedavg", "fedbabu", "niw", "fedpop")],
    ],
}


if __name__ == "__main__":
    split = sys.argv[1] if len(sys.argv) > 1 else "validation"
    study(Path(__file__).parent, split, VARIANTS[split])
