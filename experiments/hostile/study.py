"""Hostile clients on Fashion-MNIST: what four attacks do to a run, with and without the default defence.

    python -m experiments.hostile.study [SEEDS]           # such as 0,1,2; default 0

From the repository's root. A record per run goes to RECORDS.jsonl beside this file; runs that are recorded are not run again. The
table of the records is printed at the end. Needs Fashion-MNIST (`fedhb data get fashion-mnist`); 20 seconds of one core per run.

100 clients with 5 class shards each, 10 of them in a round, one local epoch, 100 rounds, the algorithms' own learning rates. The
hostile clients are drawn by the seed; a round may have none of them or half. Accuracies are global ones, on the test data of all
clients.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from experiments.records import FASHION

from fedhb import data
from fedhb.algorithms import build
from fedhb.answers.hostile import ATTACKS, attacked
from fedhb.errors import DivergedError
from fedhb.runs.from_settings import make_clients, model_of
from fedhb.runs.settings import Settings
from fedhb.runs.simulation import Keep, Population, simulate

RECORDS = Path(__file__).parent / "RECORDS.jsonl"
ALGORITHMS = ("empirical-bayes", "fedavg")
SHARES = (0.1, 0.2)
MORE = ("refuse,clip,winsorise", "refuse,krum")
"""Other filters, against the attack that the default leaves most of."""

VARIANTS = [
    *[(name, "none", 0.0, defence) for name in ALGORITHMS for defence in ("", "default")],
    *[
        (name, attack, share, "default")
        for name in ALGORITHMS
        for share in SHARES
        for attack in ATTACKS
    ],
    *[(name, attack, share, "") for name in ALGORITHMS for share in SHARES for attack in ATTACKS],
    *[(name, "sign-flip", 0.2, defence) for name in ALGORITHMS for defence in MORE],
    *[(name, "none", 0.0, defence) for name in ALGORITHMS for defence in MORE],
]


def one_run(
    name: str, attack: str, share: float, defence: str, seed: int, dataset: Any
) -> dict[str, Any]:
    """A run of this variant, and what is kept of it."""
    settings = Settings.resolve(None, FASHION | {"algorithm": name, "seed": seed, "workers": 1})
    clients, _ = make_clients(settings, dataset)
    model = model_of(settings, clients)
    algorithm = build(name, {})
    if attack != "none":
        algorithm, clients = attacked(algorithm, clients, attack, share, seed)
    record: dict[str, Any] = {
        "algorithm": name,
        "attack": attack,
        "share": share,
        "defence": defence,
        "seed": seed,
    }
    settings = settings.change(personal_epochs=1, defence=defence)
    try:
        run = simulate(settings, algorithm, model, Population(clients), Keep(progress=False))
    except DivergedError as error:
        return record | {"accuracy": None, "stopped": str(error)}
    refused, clipped = (sum(r.get(key, 0) for r in run.records) for key in ("refused", "clipped"))
    seconds = run.result["seconds"]["train"]
    return record | {
        **run.result["global"],
        "refused": refused,
        "clipped": clipped,
        "seconds": seconds,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Accuracy in percent, mean over seeds, and the distance to the clean run without a defence, in points."""
    heads = (
        "algorithm",
        "attack",
        "hostile",
        "defence",
        "accuracy",
        "to the clean run",
        "refused",
        "seeds",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    clean = {r["algorithm"]: [] for r in records}
    for r in records:
        if r["attack"] == "none" and not r["defence"]:
            clean[r["algorithm"]].append(r["accuracy"])
    for variant in VARIANTS:
        mine = [
            r for r in records if (r["algorithm"], r["attack"], r["share"], r["defence"]) == variant
        ]
        if not mine:
            continue
        name, attack, share, defence = variant
        if any(r["accuracy"] is None for r in mine):
            cells = ["stopped: NaN", "", ""]
        else:
            mean = statistics.fmean(r["accuracy"] for r in mine)
            away = mean - statistics.fmean(clean[name])
            cells = [
                f"{100 * mean:.1f}",
                f"{100 * away:+.1f}",
                f"{statistics.fmean(r['refused'] for r in mine):.0f}",
            ]
        lines.append(
            f"| {name} | {attack} | {share:.0%} | {defence or 'none'} | {' | '.join(cells)} | {len(mine)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is not recorded yet, then print the table."""
    seeds = [int(part) for part in (sys.argv[1] if len(sys.argv) > 1 else "0").split(",")]
    records = (
        [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    )
    done = {(r["algorithm"], r["attack"], r["share"], r["defence"], r["seed"]) for r in records}
    dataset = data.load("fashion-mnist")
    for seed in seeds:
        for variant in VARIANTS:
            if (*variant, seed) in done:
                continue
            records.append(one_run(*variant, seed, dataset))
            with RECORDS.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
            print(json.dumps(records[-1]), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
