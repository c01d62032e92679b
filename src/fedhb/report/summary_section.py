"""A summary of what was run: one sentence, a few large numbers, and all settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedhb.engine.schedule import cohort_size
from fedhb.report.run_data import Method, shared_settings
from fedhb.report.tables import (
    PERCENT,
    best_of,
    competes,
    keeps_of,
    metric_name,
    metric_text,
    metrics_of,
    values,
)
from fedhb.report.wording import data_size, duration, escape, listed, number, plural

Settings = dict[str, Any]
Result = dict[str, Any]


def title(methods: Sequence[Method]) -> str:
    """Return the heading of the page."""
    if len(methods) == 1:
        subject = methods[0].name
    else:
        subject = plural(len(methods), "method", spelled=True).capitalize()
    return f"{subject} on {listed(datasets(methods))}"


def datasets(methods: Sequence[Method]) -> list[str]:
    """Return the names of the data sets."""
    names = [(run.result or {}).get("dataset") or run.dataset for m in methods for run in m.runs]
    return list(dict.fromkeys(map(str, names)))


def sentence(methods: Sequence[Method]) -> str:
    """Describe the runs in a sentence."""
    common = shared_settings(methods)
    seeds = sorted({run.seed for m in methods for run in m.runs})
    names = listed([m.name for m in methods])
    text = f"{names} trained on {listed(datasets(methods))}"
    clients = client_count(methods)
    if clients:
        text += f", held by {plural(clients, 'client')}{dealing(methods, common)}"
    if {"fraction", "rounds"} <= common.keys():
        text += ", "
        if clients:
            count = cohort_size(clients, common["fraction"])
            text += f"{count if 0 < count < clients else 'all'} of them in each of "
        text += plural(common["rounds"], "round")
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
    """Return how many clients train; 0 if it is not known, or not the same in all runs."""
    counts = {run.num_clients for m in methods for run in m.runs}
    return counts.pop() if len(counts) == 1 else 0


def dealing(methods: Sequence[Method], common: Settings) -> str:
    """Describe how the data are dealt to clients; nothing if the data may name the clients."""
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
    """Return the large numbers of the first screen: (number, its label, its method or runs)."""
    finished = [m for m in methods if m.finished]
    metrics = metrics_of(methods)
    rows: list[tuple[str, str, str]] = []
    if finished and metrics:
        metric = metrics[0]
        unit = " %" if metric in PERCENT else ""
        for task in ("global", "personalised"):
            rivals = [m for m in finished if competes(keeps_of(m), task)] or finished
            means = {
                m.name: statistics.fmean(of_runs)
                for m in rivals
                if (of_runs := values(m, task, metric))
            }
            if means:
                best = best_of(metric, list(means.values()))
                name = next(name for name, mean in means.items() if mean == best)
                owner = f"best: {name}" if len(means) > 1 else name
                rows.append(
                    (metric_text(metric, best) + unit, f"{task} {metric_name(metric)}", owner)
                )
    results = [run.result for m in finished for run in m.finished if run.result]
    if results:
        seconds = sum(result["seconds"]["train"] for result in results)
        runs = plural(len(results), "run")
        rows.append((data_size(sum(map(_sent_bytes, results))), "sent in all", runs))
        rows.append((duration(seconds), "of training", runs))
    return rows


def settings_table(methods: Sequence[Method]) -> str:
    """Return the HTML of a table of all settings; those that all methods share appear once."""
    common = shared_settings(methods)
    hidden = {key for key, value in common.items() if value in ("", 0, 0.0) and key != "seed"}
    rows = [
        (key, [number(value)] * len(methods)) for key, value in common.items() if key not in hidden
    ]
    of_methods = dict.fromkeys(
        key for m in methods for key in m.first.compared if key not in common and key != "algorithm"
    )
    rows += [
        (key, [number(m.first.compared[key]) if key in m.first.compared else "" for m in methods])
        for key in of_methods
    ]
    several = any(len(m.runs) > 1 for m in methods)
    seeds = [", ".join(str(run.seed) for run in m.runs) for m in methods]
    rows.append(("seeds" if several else "seed", seeds))
    head = "".join(f'<th scope="col">{escape(m.name)}</th>' for m in methods)
    lines = []
    for key, cells in rows:
        if len(set(cells)) == 1 and len(cells) > 1:
            body = f'<td colspan="{len(cells)}">{escape(cells[0])}</td>'
        else:
            body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row"><code>{escape(key)}</code></th>{body}</tr>')
    not_set = f" Not set: {escape(', '.join(sorted(hidden)))}." if hidden else ""
    return (
        "<table><caption><span>Settings; those that all methods share appear once."
        f"{not_set}</span></caption>"
        f'<thead><tr><th scope="col">setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def provenance(methods: Sequence[Method]) -> str:
    """Return the HTML of the runs' folders, versions of packages, and hashes of data."""
    runs = [run for m in methods for run in m.runs]
    versions = list(dict.fromkeys(run.versions for run in runs if run.versions))
    files: dict[str, str] = {}
    for run in runs:
        files |= (run.result or {}).get("data") or {}
    rows = []
    for run in runs:
        cells = [
            str(run.seed),
            str(len(run.rounds)),
            _seconds(run.result, "train"),
            _seconds(run.result, "evaluate"),
            data_size(_sent_bytes(run.result)) if run.result else "–",
        ]
        numbers = "".join(f"<td class=number>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th scope=row>{escape(run.path.name)}</th>{numbers}</tr>")
    titles = ("run", "seed", "rounds", "training", "evaluation", "sent in all")
    head = "".join(
        f"<th scope=col{' class=number' if k else ''}>{name}</th>" for k, name in enumerate(titles)
    )
    text = (
        f"<table><caption>Runs</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    text += f"<p>Versions: {escape('; '.join(versions) or 'not recorded')}.</p>"
    if files:
        hashes = "".join(
            f"<li>{escape(name)}: <code>{escape(digest[:16])}…</code></li>"
            for name, digest in files.items()
        )
        text += f"<p>Data, by SHA-256:</p><ul>{hashes}</ul>"
    return text


def _seconds(result: Result | None, part: str) -> str:
    return duration(result["seconds"][part]) if result else "–"


def _sent_bytes(result: Result) -> float:
    return result["communication"]["down_bytes"] + result["communication"]["up_bytes"]
