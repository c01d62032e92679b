"""The result table: methods by tasks and metrics, the best in bold, the paper's numbers beside ours. And the worst clients."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedhb.report.paper_numbers import Printed
from fedhb.report.run_data import Method
from fedhb.report.wording import data_size, duration, escape, listed

NAMES = {
    "accuracy": "accuracy, %",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "rmse": "RMSE",
    "coverage": "coverage, %",
}
LONG = {
    "accuracy": "share of right predictions",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "rmse": "root mean squared error",
    "coverage": "share of targets in their 90 % interval",
}
TASKS = {"global": "global prediction", "personalised": "after personalisation"}
WORST = 5


def metric_text(metric: str, value: float) -> str:
    """A metric's value, without unit."""
    return (
        f"{100 * value:.2f}"
        if metric in ("accuracy", "coverage")
        else f"{value:.4f}"
        if abs(value) < 100
        else f"{value:.4g}"
    )


def values(method: Method, task: str, metric: str) -> list[float]:
    """A metric's value in each finished run of a method; `novel_` tasks are those of hold-out clients."""
    found = []
    for run in method.finished:
        assert run.result is not None
        source = run.result["holdout"] if task.startswith("novel_") else run.result
        metrics = (source or {}).get(task.removeprefix("novel_"))
        if metrics and metric in metrics:
            found.append(metrics[metric])
    return found


def metrics_of(methods: Sequence[Method]) -> list[str]:
    """The metrics that the results have."""
    found: dict[str, None] = {}
    for method in methods:
        for run in method.finished:
            found |= dict.fromkeys((run.result or {}).get("global") or {})
    return list(found)


REMEMBERED = {"fedem": "mixture weights", "fedpop": "heads"}
"""What clients that took part keep of their own, and predict with also before they personalise."""


def competes(algorithm: str, task: str) -> bool:
    """Whether an algorithm's numbers are among those that the best is taken of: a personal model is no global prediction."""
    return task != "global" or algorithm not in REMEMBERED


def remembered(algorithms: Iterable[str]) -> str:
    """What is to be known of the global predictions of these algorithms; empty where there is nothing."""
    kept = {name: REMEMBERED[name] for name in dict.fromkeys(algorithms) if name in REMEMBERED}
    if not kept:
        return ""
    whose = " and ".join(f"{name} with {what}" for name, what in kept.items())
    return f"clients predict by {whose} of their own, before personalisation too: what the server alone predicts, novel clients show"


def best_of(metric: str, means: Sequence[float]) -> float:
    """The best value: coverage is best near its level."""
    if metric == "coverage":
        return min(means, key=lambda value: abs(value - 0.9))
    return max(means) if metric == "accuracy" else min(means)


def result_table(
    methods: Sequence[Method], printed: Mapping[str, Printed], novel: bool = False
) -> str:
    """HTML: a row per method; empty where no run has such a result."""
    prefix, metrics = ("novel_" if novel else ""), metrics_of(methods)
    columns = [(prefix + task, metric) for task in TASKS for metric in metrics]
    shown = [m for m in methods if any(values(m, task, metric) for task, metric in columns)]
    if not shown:
        return ""
    means = {
        (m.name, *c): statistics.fmean(v) for m in shown for c in columns if (v := values(m, *c))
    }
    rivals = {c: [m for m in shown if competes(algorithm_of(m), c[0])] for c in columns}
    best = {
        c: best_of(c[1], every)
        for c in columns
        if (every := [means[m.name, *c] for m in rivals[c] if (m.name, *c) in means])
    }
    known = "" if novel else remembered(map(algorithm_of, shown))
    cost = [] if novel else ["sent per client and round", "training"]
    who = "novel clients, which never trained" if novel else "the training clients"
    lines = [
        f'<table class="results"><caption><span>Mean over {who}, each counting the same, at the last round{_split(shown)}'
        + ("; ± standard deviation over seeds" if any(len(m.finished) > 1 for m in shown) else "")
        + (". Best in bold" if len(shown) > 1 else "")
        + (". In grey: printed in the paper" if printed and not novel else "")
        + (f". Global prediction: {escape(known)}" if known else "")
        + ".</span></caption><thead>",
        '<tr><th rowspan="2" scope="col">method</th>'
        + "".join(
            f'<th colspan="{len(metrics)}" scope="colgroup" class="task">{escape(name)}</th>'
            for name in TASKS.values()
        )
        + "".join(
            f'<th rowspan="2" scope="col" class="number">{escape(name)}</th>' for name in cost
        )
        + "</tr><tr>"
        + "".join(
            f'<th scope="col" class="number{" first" if metric == metrics[0] else ""}">'
            f'<abbr title="{escape(LONG.get(metric, metric))}">{escape(NAMES.get(metric, metric))}</abbr></th>'
            for _, metric in columns
        )
        + "</tr></thead><tbody>",
    ]
    for m in shown:
        cells = [
            _cell(values(m, *c), c[1], len(shown) > 1 and m in rivals[c] and c in best and means.get((m.name, *c)) == best[c],
                  printed.get(m.name, {}).get(c), c[1] == metrics[0])
            for c in columns
        ]  # fmt: skip
        extra = (
            []
            if novel
            else [
                _sent(m),
                duration(
                    statistics.fmean((r.result or {})["seconds"]["train"] for r in m.finished)
                ),
            ]
        )
        head = f'<th scope="row"><span class="dot" style="background:{m.style.colour}"></span>{escape(m.name)}</th>'
        lines.append(
            f"<tr>{head}{''.join(cells)}{''.join(f'<td class=number>{escape(text)}</td>' for text in extra)}</tr>"
        )
    return "\n".join([*lines, "</tbody></table>"])


def algorithm_of(method: Method) -> str:
    """The algorithm of a method's runs."""
    return str((method.finished[0].result or {})["algorithm"]) if method.finished else ""


def _split(methods: Sequence[Method]) -> str:
    """Which examples the numbers are of, where they are not test examples; by method where that differs."""
    found: dict[str, list[str]] = {}
    for m in methods:
        found.setdefault(str((m.finished[0].result or {}).get("split")), []).append(m.name)
    if found.keys() <= {"test", "None"}:
        return ""
    whose = [
        f"{split} examples" + (f" ({listed(names)})" if len(found) > 1 else "")
        for split, names in found.items()
    ]
    return escape(f", on {listed(whose)}")


def _cell(
    found: Sequence[float],
    metric: str,
    best: bool,
    paper: tuple[float, float | None] | None,
    first: bool,
) -> str:
    if not found:
        return '<td class="number">–</td>'
    text = metric_text(metric, statistics.fmean(found))
    text = f"<strong>{text}</strong>" if best else text
    if len(found) > 1:
        text += f'<br><span class="spread">±{metric_text(metric, statistics.stdev(found))}</span>'
    if paper is not None:
        spread = f" ±{metric_text(metric, paper[1])}" if paper[1] is not None else ""
        text += f'<br><span class="paper">paper {metric_text(metric, paper[0])}{spread}</span>'
    return f'<td class="number{" first" if first else ""}">{text}</td>'


def _sent(method: Method) -> str:
    sent = (method.finished[0].result or {})["communication"]["per_client_round"]
    return f"↓ {data_size(sent['down_bytes'])} ↑ {data_size(sent['up_bytes'])}"


def worst_clients(method: Method) -> str:
    """HTML: the clients with the worst personalised metric, what they hold, and the metric before and after."""
    run = method.first
    per_client: dict[str, Any] = (run.result or {}).get("per_client") or {}
    keys = [key for key in per_client if key != "client"]
    if len(keys) < 2:
        return ""
    main = keys[0].partition("_")[2]
    before, after = (per_client[f"{task}_{main}"] for task in ("global", "personalised"))
    names = per_client.get("client", list(range(len(before))))
    order = sorted(
        (k for k in range(len(after)) if after[k] is not None),
        key=lambda k: after[k],
        reverse=main == "rmse",
    )[:WORST]
    clients = (run.evaluation or {}).get("clients") or {}
    place = {name: k for k, name in enumerate(clients.get("client", []))}
    rows = []
    for k in order:
        about = ""
        if names[k] in place and clients.get("labels"):
            labels = clients["labels"][place[names[k]]]
            held = sorted(
                (label for label, count in enumerate(labels) if count),
                key=lambda label: -labels[label],
            )
            about = ", ".join(f"{label} ({labels[label]})" for label in held[:6]) + (
                " …" if len(held) > 6 else ""
            )
        size = clients["sizes"][place[names[k]]] if names[k] in place else ""
        cells = [metric_text(main, before[k]), metric_text(main, after[k]), str(size)]
        body = "".join(f"<td class=number>{escape(cell)}</td>" for cell in cells) + (
            f"<td>{escape(about)}</td>" if about else ""
        )
        rows.append(f'<tr><th scope="row">{escape(str(names[k]))}</th>{body}</tr>')
    head = ["client", f"global {NAMES.get(main, main)}", "personalised", "training examples"]
    head += ["labels (examples)"] if clients.get("labels") else []
    titles = "".join(
        f'<th scope="col"{"" if k in (0, 4) else " class=number"}>{escape(text)}</th>'
        for k, text in enumerate(head)
    )
    caption = f"The clients that {escape(method.name)} serves worst, seed {run.seed}"
    return f"<table><caption><span>{caption}</span></caption><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
