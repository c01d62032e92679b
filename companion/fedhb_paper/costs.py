"""What a step costs on this machine: seconds and bytes, per method (tab:running_time, tab:complexity_train, _global, _personal).

Measured with one thread, for one client at a time as on a device of its own:

    client          the client's update in a round: tau epochs
    server          the sums over N_f = f N answers, and the new state
    global          the global prediction for the test examples of a client
    personalised    the personalisation of a client
    personal_test   its prediction for its test examples
    down, up        what a client receives and sends in a round, in bytes

Each is the median of `repeats` measurements after a first one that does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fedhb.algorithms import Plan, build
from fedhb.algorithms.toolbox import add
from fedhb.clients.clients import Clients
from fedhb.engine.schedule import cohort_size
from fedhb.runs.fit import fit
from fedhb.runs.from_settings import fit_options, make_clients, model_of
from fedhb.runs.jobs import Tell
from fedhb.runs.records import Key
from fedhb.runs.run import Run, one_thread
from fedhb.runs.run_grid import dataset_of, settings_of
from fedhb_paper import cells
from fedhb_paper.bench.machine import processor
from fedhb_paper.cells import work
from fedhb_paper.stale_records import star

__all__ = ["resolved", "run", "tables", "work"]

STEPS = ("client", "server", "global", "personalised", "personal_test")
REPEATS = 5

Record = Mapping[str, Any]


def resolved(settings: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """The settings of the run, and how often each step is measured."""
    return cells.resolved(settings, key) | {"repeats": settings.get("repeats", REPEATS)}


def run(settings: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure every step, on a state that one client has trained for a round."""
    chosen = settings_of(settings, key)
    clients, _ = make_clients(chosen, dataset_of(chosen.dataset, chosen.data))
    model, _ = model_of(chosen, clients)
    algorithm = build(chosen.algorithm, chosen.options.get(chosen.algorithm, {}))
    tell(0.0, "a round")
    options = fit_options(replace(chosen, rounds=1, fraction=1 / len(clients))) | {
        "evaluate_on": None
    }
    found = fit(model, clients, algorithm, **options, progress=False)
    plan = Plan(
        chosen.local_epochs,
        chosen.batch_size,
        chosen.lr,
        chosen.momentum,
        algorithm.update == "full",
    )
    clients = clients.to(str(found.problem.network.device))
    seconds = measure(found, clients, plan, chosen.fraction, settings.get("repeats", REPEATS), tell)
    batches = math.ceil(int(clients.sizes[0]) / chosen.batch_size)
    sent = found.result["communication"]["per_client_round"]
    return {
        "seconds": seconds,
        "batches": {
            "client": batches * chosen.local_epochs,
            "personalised": batches * chosen.personal_epochs,
        },
        "bytes": {"down": sent["down_bytes"], "up": sent["up_bytes"]},
        "parameters": found.problem.network.num_params,
        "answers": cohort_size(len(clients), chosen.fraction),
        "processor": processor(),
    }


def measure(
    run: Run, clients: Clients, plan: Plan, fraction: float, repeats: int, tell: Tell
) -> dict[str, float]:
    """Seconds of every step."""
    problem, algorithm, server, rng = run.problem, run.algorithm, run.state.server, run.rng
    one, count = clients.select([0]), cohort_size(len(clients), fraction)
    received = algorithm.broadcast(server, one.ids.tolist())
    memory = run.state.store.load(algorithm, problem, one)
    x, _ = (one.test or one.train).examples(0)
    with one_thread():
        answer, _ = algorithm.local_update(problem, received, one, memory, plan, rng)
        mine = algorithm.personalise(problem, server, one, memory, run.personal_plan, rng)

        def serve() -> None:
            total = None
            for _ in range(count):
                total = add(total, algorithm.summarise(problem, received, answer, rng))
            assert total is not None
            algorithm.aggregate(problem, server, total, rng)

        steps: dict[str, Callable[[], object]] = {
            "client": lambda: algorithm.local_update(problem, received, one, memory, plan, rng),
            "server": serve,
            "global": lambda: algorithm.predict(problem, server, x, rng, memory or None),
            "personalised": lambda: algorithm.personalise(
                problem, server, one, memory, run.personal_plan, rng
            ),
            "personal_test": lambda: mine.predict(x.unsqueeze(0)),
        }
        found = {}
        for done, (name, step) in enumerate(steps.items()):
            tell(0.2 + 0.8 * done / len(steps), name)
            found[name] = median(step, repeats)
    return found


def median(step: Callable[[], object], repeats: int) -> float:
    """The median of the seconds that a step takes."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def tables(
    settings: Mapping[str, Any],
    printed: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
) -> list[Table]:
    """Seconds of every step beside the printed ones; and per batch, with bytes in units of d, beside the formulas."""
    found = []
    names = {row["cell"]: None for row in printed} | {r["key"]["cell"]: None for r in records}
    for cell in names:
        rows = [row for row in printed if row["cell"] == cell]
        own = {
            r["key"]["variant"]: r
            for r in records
            if r["key"]["cell"] == cell and "seconds" in r["result"]
        }
        mine = {variant: record["result"] for variant, record in own.items()}
        theirs = {(row["algorithm"], row["task"], row["metric"]): row["mean"] for row in rows}
        variants = [
            v
            for v in settings["variants"]
            if v in mine or any(row["algorithm"] == v for row in rows)
        ]
        heads = [
            f"{variant}{star([own[variant]])}" if variant in own else variant
            for variant in variants
        ]
        about = next(
            (f", {r['answers']} answers a round, {r['processor']}" for r in mine.values()), ""
        )
        if not any(metric == "formula" for _, _, metric in theirs):
            table = Table("seconds", *heads, title=f"{cell}{about}", show_lines=True)
            for step in STEPS:
                texts = [_both(mine, theirs, variant, step, "seconds") for variant in variants]
                table.add_row(step, *texts)
            found.append(table)
            continue
        table = Table("per client and batch", *heads, title=f"{cell}{about}", show_lines=True)
        for way in ("down", "up", *STEPS):
            table.add_row(
                way, *(_both(mine, theirs, variant, way, "formula") for variant in variants)
            )
        found.append(table)
    return found


def _both(
    mine: Mapping[str, Any], theirs: Mapping[Any, Any], variant: str, step: str, metric: str
) -> str:
    lines = [_ours(mine[variant], step, metric)] if variant in mine else []
    if (variant, step, metric) in theirs:
        lines.append(f"[dim]printed {theirs[variant, step, metric]}[/dim]")
    return "\n".join(lines)


def _ours(result: Mapping[str, Any], step: str, metric: str) -> str:
    if step in ("down", "up"):
        return f"{result['bytes'][step] / 4 / result['parameters']:.2f} d = {result['bytes'][step] / 1e6:.3f} MB"
    seconds = result["seconds"][step]
    if metric == "seconds":
        return f"{seconds:.4f}"
    return f"{1e3 * seconds / result['batches'].get(step, 1):.3f} ms"
