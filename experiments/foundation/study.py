"""How the defaults of NIW and Mixture were chosen, and what they give: Fashion-MNIST, 100 clients, 5 shards, f = 0.1, 100 rounds.

    python -m experiments.foundation.study validation     # every variant, on validation data, seeds 100 and 101
    python -m experiments.foundation.study test           # the chosen defaults and controls, on test data, seeds 0 to 2

From the repository's root. A record per run goes to VALIDATION.jsonl or TEST.jsonl beside this file; runs that are recorded are
not run again. The table of the records is printed at the end. Needs Fashion-MNIST (`fedhb data get fashion-mnist`); half a
minute of one core per run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.records import study

PRINTED = ["niw.kl_weight=1.0", "niw.lambda0=1.0"]
VARIANTS: dict[str, list[list[str]]] = {
    "validation": [
        ["fedavg"],
        ["fedprox"],
        ["fedbabu"],
        ["niw", *PRINTED],
        ["niw", "niw.lambda0=1.0"],
        ["niw", "niw.kl_weight=0.01"],
        ["niw", "niw.kl_weight=0.001"],
        ["niw"],
        ["niw", "niw.kl_weight=1e-5"],
        ["niw", "niw.kl_weight=0.0"],
        ["niw", "niw.p_do=1.0"],
        ["niw", "niw.num_samples=0"],
        ["niw", "niw.num_samples=10"],
        ["niw", "niw.dof=per_coordinate", "niw.kl_weight=1.0", "niw.num_samples=0"],
        ["niw", "niw.begin=last"],
        ["mixture"],
        ["mixture", "mixture.shrink=true"],
        ["mixture", "mixture.begin=nearest"],
        ["mixture", "mixture.begin=nearest", "mixture.sigma2=1.0"],
        ["mixture", "mixture.num_prototypes=1"],
    ],
    "test": [
        ["fedavg"],
        ["fedprox"],
        ["fedbabu"],
        ["niw"],
        ["niw", "niw.kl_weight=0.0"],
        ["mixture"],
        ["mixture", "mixture.kl_weight=0.0"],
    ],
}


if __name__ == "__main__":
    split = sys.argv[1] if len(sys.argv) > 1 else "validation"
    study(Path(__file__).parent, split, VARIANTS[split])
