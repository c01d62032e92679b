"""What was run: one sentence, a few large numbers, and all settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedhb.engine.schedule import cohort_size
from fedhb.report.run_data import Method, shared_settings
from fedhb.report.tables import (
    NAMES,
    algorithm_of,
    best_of,
    competes,
    metric_text,
    metrics_of,
    values,
)
from fedhb.report.wording import data_size, duration, escape, listed, number, plural

Settings = dict[str, Any]


def title(methods: Sequence[Method]) -> str:
    """A heading."""
    names = [method.name for method in methods]
    what = (
        names[0]
        if len(names) == 1
        else f"{plural(len(names), 'method', spelled=True)}".capitalize()
    )
    return f"{what} on {listed(datasets(methods))}"


def datasets(methods: Sequence[Method]) -> list[str]:
    """The data sets, by name."""
    found = [(run.result or {}).get("dataset") or run.dataset for m in methods for run in m.runs]
    return list(dict.fromkeys(map(str, found)))


def sentence(methods: Sequence[Method]) -> str:
    """What was run."""
    common: Settings = dict(shared_settings(methods).items())
    seeds = sorted({run.seed for m in methods for run in m.runs})
    names = listed([m.name for m in methods])
    text = f"{names} trained on {listed(datasets(methods))}"
    clients = client_count(methods)
    if clients:
        text += f", held by {plural(clients, 'client')}{dealing(methods, common)}"
    if {"fraction", "rounds"} <= common.keys():
        count = cohort_size(clients, common["fraction"]) if clients else None
        each = (
            f"{count} of them in each of "
            if count and count < clients
            else "all of them in each of "
            if clients
            else ""
        )
        text += f", {each}{plural(common['rounds'], 'round')}"
        if "local_epochs" in common:
            text += f" of {plural(common['local_epochs'], 'local epoch')}"
    text += f"; seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    unfinished = [
        f"{run.path.name} (round {len(run.rounds)})"
        for m in methods
        for run in m.runs
        if run.result is None
    ]
    return text + (f" Not finished: {listed(unfinished)}." if unfinished else "")


def client_count(methods: Sequence[Method]) -> int:
    """How many clients train; 0 where it is not known, or not the same in all runs."""
    counts = {run.num_clients for m in methods for run in m.runs}
    return counts.pop() if len(counts) == 1 else 0


def dealing(methods: Sequence[Method], common: Settings) -> str:
    """How the data are dealt to clients; nothing where the data may have named them."""
    kind = common.get("partition", "")
    if any(run.named_by_data for m in methods for run in m.runs):
        return ""
    if kind == "dirichlet":
        return f" (Dirichlet partition, α = {common.get('alpha')})"
    if kind == "iid":
        return " (dealt at random)"
    if kind in ("", "shards") and "shards_per_client" in common:
        return f" with at most {plural(common['shards_per_client'], 'class', 'classes')} each"
    return ""


def facts(methods: Sequence[Method]) -> list[tuple[str, str, str]]:
    """The large numbers of the first screen: (number, what it is, whose)."""
    finished = [m for m in methods if m.finished]
    metrics = metrics_of(methods)
    found: list[tuple[str, str, str]] = []
    if finished and metrics:
        main = metrics[0]
        for task, label in (("global", "global"), ("personalised", "personalised")):
            rivals = [m for m in finished if competes(algorithm_of(m), task)] or finished
            means = {m.name: statistics.fmean(v) for m in rivals if (v := values(m, task, main))}
            if means:
                best = best_of(main, list(means.values()))
                name = next(n for n, value in means.items() if value == best)
                unit = " %" if main in ("accuracy", "coverage") else ""
                what = f"{label} {NAMES.get(main, main).removesuffix(', %')}"
                found.append(
                    (
                        metric_text(main, best) + unit,
                        what,
                        f"best: {name}" if len(means) > 1 else name,
                    )
                )
    results = [run.result for m in finished for run in m.finished if run.result]
    if results:
        total = sum(
            r["communication"]["down_bytes"] + r["communication"]["up_bytes"] for r in results
        )
        train = sum(r["seconds"]["train"] for r in results)
        runs = plural(len(results), "run")
        found += [(data_size(total), "sent in all", runs), (duration(train), "of training", runs)]
    return found


def settings_table(methods: Sequence[Method]) -> str:
    """HTML: every setting, those that all methods share once."""
    common = shared_settings(methods)
    hidden = {key for key, value in common.items() if value in ("", 0, 0.0) and key != "seed"}
    rows = [
        (key, [number(value)] * len(methods)) for key, value in common.items() if key not in hidden
    ]
    own = dict.fromkeys(
        key for m in methods for key in m.first.compared if key not in common and key != "algorithm"
    )
    rows += [
        (key, [number(m.first.compared[key]) if key in m.first.compared else "" for m in methods])
        for key in own
    ]
    rows.append(("seeds", [", ".join(str(run.seed) for run in m.runs) for m in methods]))
    head = "".join(f'<th scope="col">{escape(m.name)}</th>' for m in methods)
    lines = []
    for key, cells in rows:
        if len(set(cells)) == 1 and len(cells) > 1:
            body = f'<td colspan="{len(cells)}">{escape(cells[0])}</td>'
        else:
            body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row"><code>{escape(key)}</code></th>{body}</tr>')
    left_out = f" Left at nothing: {escape(', '.join(sorted(hidden)))}." if hidden else ""
    return (
        f"<table><caption><span>Settings; what all methods share is written once.{left_out}</span></caption>"
        f'<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def provenance(methods: Sequence[Method]) -> str:
    """HTML: where the runs lie, what made them and with which data."""
    runs = [run for m in methods for run in m.runs]
    versions = list(dict.fromkeys(run.versions for run in runs if run.versions))
    files: dict[str, str] = {}
    for run in runs:
        files |= (run.result or {}).get("data") or {}
    rows = [
        f"<tr><th scope=row>{escape(run.path.name)}</th><td class=number>{run.seed}</td><td class=number>{len(run.rounds)}</td>"
        f"<td class=number>{_seconds(run.result, 'train')}</td><td class=number>{_seconds(run.result, 'evaluate')}</td>"
        f"<td class=number>{_sent(run.result)}</td></tr>"
        for run in runs
    ]
    head = "".join(f"<th scope=col{' class=number' if k else ''}>{t}</th>" for k, t in enumerate(
        ("run", "seed", "rounds", "training", "evaluation", "sent in all")))  # fmt: skip
    text = f"<table><caption>Runs</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    text += f"<p>Versions: {escape('; '.join(versions) or 'not recorded')}.</p>"
    if files:
        hashes = "".join(
            f"<li>{escape(name)}: <code>{escape(digest[:16])}…</code></li>"
            for name, digest in files.items()
        )
        text += f"<p>Data, by SHA-256:</p><ul>{hashes}</ul>"
    return text


def _seconds(result: Settings | None, what: str) -> str:
    return duration(result["seconds"][what]) if result else "–"


def _sent(result: Settings | None) -> str:
    return (
        data_size(result["communication"]["down_bytes"] + result["communication"]["up_bytes"])
        if result
        else "–"
    )
