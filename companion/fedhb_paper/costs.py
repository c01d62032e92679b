"""Kind `costs`: seconds and bytes of every step of a method on this machine.

They stand beside tab:running_time and tab:complexity_train, _global and _personal. Everything is
measured with one thread, for one client at a time, as on a device of its own:

    client          the client's update in a round: tau epochs
    server          the sums over N_f = f N answers, and the new state
    global          the global prediction for the test examples of a client
    personalised    the personalisation of a client
    personal_test   its prediction for its test examples
    down, up        the bytes that a client receives and sends in a round

Each is the median of `repeats` measurements after a first one that does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedhb.algorithms import Plan
from fedhb.algorithms.toolbox import add
from fedhb.clients.clients import Clients
from fedhb.engine.schedule import cohort_size
from fedhb.runs.from_settings import make_clients, train
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
    """Return the settings of the run, and how often each step is measured."""
    return cells.resolved(settings, key) | {"repeats": settings.get("repeats", REPEATS)}


def run(settings: Mapping[str, Any], key: Key, folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure every step, on a state that one client has trained for a round."""
    chosen = settings_of(settings, key)
    local, dataset = chosen.training, dataset_of(chosen.data.dataset, chosen.data.file)
    clients, _ = make_clients(chosen, dataset)
    tell(0.0, "a round")
    short = chosen.change(rounds=1, fraction=1 / len(clients), evaluate_on="")
    trained = train(short, dataset=dataset, progress=False)
    plan = chosen.plan(train_head=trained.algorithm.update == "full")
    clients = clients.to(str(trained.problem.network.device))
    seconds = measure(
        trained, clients, plan, local.fraction, settings.get("repeats", REPEATS), tell
    )
    batches = math.ceil(int(clients.sizes[0]) / local.batch_size)
    sent = trained.result["communication"]["per_client_round"]
    return {
        "seconds": seconds,
        "batches": {
            "client": batches * local.local_epochs,
            "personalised": batches * chosen.personalisation.epochs,
        },
        "bytes": {"down": sent["down_bytes"], "up": sent["up_bytes"]},
        "parameters": trained.problem.network.num_params,
        "answers": cohort_size(len(clients), local.fraction),
        "processor": processor(),
    }


def measure(
    run: Run, clients: Clients, plan: Plan, fraction: float, repeats: int, tell: Tell
) -> dict[str, float]:
    """Return the seconds of every step."""
    problem, algorithm, server, rng = run.problem, run.algorithm, run.state.server, run.rng
    client, count = clients.select([0]), cohort_size(len(clients), fraction)
    received = algorithm.broadcast(server, client.ids.tolist())
    memory = run.state.store.load(algorithm, problem, client)
    x, _ = (client.test or client.train).examples(0)
    with one_thread():
        answer, _ = algorithm.local_update(problem, received, client, memory, plan, rng)
        personal = algorithm.personalise(problem, server, client, memory, run.personal_plan, rng)

        def serve() -> None:
            total = None
            for _ in range(count):
                total = add(total, algorithm.summarise(problem, received, answer, rng))
            assert total is not None
            algorithm.aggregate(problem, server, total, rng)

        steps: dict[str, Callable[[], object]] = {
            "client": lambda: algorithm.local_update(problem, received, client, memory, plan, rng),
            "server": serve,
            "global": lambda: algorithm.predict(problem, server, x, rng, memory or None),
            "personalised": lambda: algorithm.personalise(
                problem, server, client, memory, run.personal_plan, rng
            ),
            "personal_test": lambda: personal.predict(x.unsqueeze(0)),
        }
        seconds = {}
        for done, (name, step) in enumerate(steps.items()):
            tell(0.2 + 0.8 * done / len(steps), name)
            seconds[name] = median(step, repeats)
    return seconds


def median(step: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds that a step takes."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def tables(
    settings: Mapping[str, Any],
    printed: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
) -> list[Table]:
    """Return tables of the seconds of every step beside the printed ones.

    Where the paper prints formulas, they have milliseconds per batch, and bytes in units of d.
    """
    shown = []
    names = {row["cell"]: None for row in printed} | {r["key"]["cell"]: None for r in records}
    for cell in names:
        rows = [row for row in printed if row["cell"] == cell]
        measured = {
            r["key"]["variant"]: r
            for r in records
            if r["key"]["cell"] == cell and "seconds" in r["result"]
        }
        results = {variant: record["result"] for variant, record in measured.items()}
        of_paper = {(row["algorithm"], row["task"], row["metric"]): row["mean"] for row in rows}
        variants = [
            v
            for v in settings["variants"]
            if v in results or any(row["algorithm"] == v for row in rows)
        ]
        heads = [
            f"{variant}{star([measured[variant]])}" if variant in measured else variant
            for variant in variants
        ]
        about = next(
            (f", {r['answers']} answers a round, {r['processor']}" for r in results.values()), ""
        )
        if not any(metric == "formula" for _, _, metric in of_paper):
            table = Table("seconds", *heads, title=f"{cell}{about}", show_lines=True)
            for step in STEPS:
                texts = [_both(results, of_paper, variant, step, "seconds") for variant in variants]
                table.add_row(step, *texts)
            shown.append(table)
            continue
        table = Table("per client and batch", *heads, title=f"{cell}{about}", show_lines=True)
        for way in ("down", "up", *STEPS):
            table.add_row(
                way, *(_both(results, of_paper, variant, way, "formula") for variant in variants)
            )
        shown.append(table)
    return shown


def _both(
    results: Mapping[str, Any], of_paper: Mapping[Any, Any], variant: str, step: str, metric: str
) -> str:
    lines = [_ours(results[variant], step, metric)] if variant in results else []
    if (variant, step, metric) in of_paper:
        lines.append(f"[dim]printed {of_paper[variant, step, metric]}[/dim]")
    return "\n".join(lines)


def _ours(result: Mapping[str, Any], step: str, metric: str) -> str:
    if step in ("down", "up"):
        count = result["bytes"][step]
        return f"{count / 4 / result['parameters']:.2f} d = {count / 1e6:.3f} MB"
    seconds = result["seconds"][step]
    if metric == "seconds":
        return f"{seconds:.4f}"
    return f"{1e3 * seconds / result['batches'].get(step, 1):.3f} ms"
