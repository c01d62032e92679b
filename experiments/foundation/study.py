"""How the defaults of NIW and Mixture were chosen, and what they give: Fashion-MNIST, 100 clients, 5 shards, f = 0.1, 100 rounds.

    python experiments/foundation/study.py validation     # every variant, on validation data, seeds 100 and 101
    python experiments/foundation/study.py test           # the chosen defaults and controls, on test data, seeds 0 to 2

A record per run goes to VALIDATION.jsonl or TEST.jsonl beside this file; runs that are recorded are not run again. The table of
the records is printed at the end. Needs Fashion-MNIST (`fedhb data get fashion-mnist`); half a minute of one core per run.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from fedhb import data
from fedhb.experiment import train
from fedhb.settings import Settings

HERE = Path(__file__).parent
PAPER = {
    "dataset": "fashion-mnist",
    "num_clients": 100,
    "shards_per_client": 5,
    "fraction": 0.1,
    "local_epochs": 1,
    "rounds": 100,
}

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
SEEDS = {"validation": (100, 101), "test": (0, 1, 2)}


def main(split: str) -> None:
    """Run what is missing, then print the table."""
    path = HERE / f"{split.upper()}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(tuple(r["variant"]), r["seed"]) for r in records}
    dataset = data.load("fashion-mnist")
    for seed in SEEDS[split]:
        for variant in VARIANTS[split]:
            if (tuple(variant), seed) in done:
                continue
            held_back = {"validation": 0.1, "evaluate_on": "validation"} if split == "validation" else {}
            settings = Settings.resolve(None, PAPER | held_back | {"algorithm": variant[0], "seed": seed}, variant[1:])
            run = train(settings, None, dataset=dataset, progress=False)
            record = {
                "variant": variant,
                "seed": seed,
                "global": run.result["global"],
                "personalised": run.result["personalised"],
            }
            shares = [r["penalty_share"] for r in run.records if "penalty_share" in r]
            record["penalty_share"] = statistics.fmean(shares) if shares else None
            record["effective_prototypes"] = [r["effective_prototypes"] for r in run.records[::10] if "effective_prototypes" in r]
            record["seconds"] = run.result["seconds"]
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            records.append(record)
            accuracies = [f"{100 * record[task]['accuracy']:.2f}" for task in ("global", "personalised")]
            print(f"{' '.join(variant)} seed {seed}: {' / '.join(accuracies)}", flush=True)
    print(table(records))


def table(records: list[dict]) -> str:
    """Markdown: a line per variant, means and deviations over seeds."""
    lines = [
        "| settings | global accuracy | NLL | ECE | personalised accuracy | NLL | ECE | KL share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in dict.fromkeys(tuple(r["variant"]) for r in records):
        mine = [r for r in records if tuple(r["variant"]) == variant]

        def cell(task: str, metric: str, scale: float, digits: int, mine: list[dict] = mine) -> str:
            values = [scale * r[task][metric] for r in mine]
            spread = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 2 else ""
            return f"{statistics.fmean(values):.{digits}f}{spread}"

        cells = [
            c
            for task in ("global", "personalised")
            for c in (cell(task, "accuracy", 100, 2), cell(task, "nll", 1, 3), cell(task, "ece", 1, 3))
        ]
        share = mine[0]["penalty_share"]
        cells.append("" if share is None else f"{100 * statistics.fmean(r['penalty_share'] for r in mine):.1f} %")
        lines.append(f"| {' '.join(variant)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "validation")
