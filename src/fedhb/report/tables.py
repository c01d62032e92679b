"""The result table, with the paper's numbers beside ours, and the table of the worst clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedhb.likelihood import GaussianRegression
from fedhb.report.paper_numbers import Printed
from fedhb.report.run_data import Method
from fedhb.report.wording import data_size, duration, escape, listed

LEVEL = GaussianRegression.level
"""The level of the intervals whose coverage is a metric."""
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
    "coverage": f"share of targets in their {100 * LEVEL:.0f} % interval",
}
PERCENT = ("accuracy", "coverage")
"""The metrics that are shown in per cent."""
TASKS = {"global": "global prediction", "personalised": "after personalisation"}
NUM_WORST = 5
"""How many clients the table of the worst clients has."""
MAX_LABELS = 6
"""The table of the worst clients lists at most so many labels of a client."""


def metric_text(metric: str, value: float) -> str:
    """Write a metric's value, without its unit."""
    if metric in PERCENT:
        return f"{100 * value:.2f}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def metric_name(metric: str) -> str:
    """Return a metric's name, without its unit."""
    return NAMES.get(metric, metric).removesuffix(", %")


def values(method: Method, task: str, metric: str) -> list[float]:
    """Return a metric's value in each finished run of a method.

    The tasks are those of `TASKS`; with the prefix `novel_` they are those of hold-out clients.
    """
    of_runs = []
    for run in method.finished:
        assert run.result is not None
        source = run.result["holdout"] if task.startswith("novel_") else run.result
        metrics = (source or {}).get(task.removeprefix("novel_"))
        if metrics and metric in metrics:
            of_runs.append(metrics[metric])
    return of_runs


def metrics_of(methods: Sequence[Method]) -> list[str]:
    """Return the metrics that the results of these methods have."""
    metrics: dict[str, None] = {}
    for method in methods:
        for run in method.finished:
            metrics |= dict.fromkeys((run.result or {}).get("global") or {})
    return list(metrics)


def competes(keeps: str, task: str) -> bool:
    """Return whether an algorithm's numbers can be the best ones of a task.

    Where clients keep a part of their model, the global prediction uses parts of personal models.
    """
    return task != "global" or not keeps


def kept_parts(parts: Mapping[str, str]) -> str:
    """Explain the global predictions of algorithms by the parts that their clients keep."""
    names = " and ".join(f"{name} with {part} of their own" for name, part in parts.items() if part)
    if not names:
        return ""
    return (
        f"the clients of {names} predict with these before personalisation too; novel clients show "
        "the prediction of the server alone"
    )


def best_of(metric: str, means: Sequence[float]) -> float:
    """Return the best value of a metric; coverage is best near its level."""
    if metric == "coverage":
        return min(means, key=lambda value: abs(value - LEVEL))
    return max(means) if metric == "accuracy" else min(means)


def result_table(
    methods: Sequence[Method], printed: Mapping[str, Printed], novel: bool = False
) -> str:
    """Return the HTML of a row per method; empty if no run has a result.

    Args:
        methods: the methods.
        printed: the paper's numbers, by method.
        novel: whether the results are those of hold-out clients.
    """
    prefix, metrics = ("novel_" if novel else ""), metrics_of(methods)
    columns = [(prefix + task, metric) for task in TASKS for metric in metrics]
    shown = [m for m in methods if any(values(m, *column) for column in columns)]
    if not shown:
        return ""
    means = {
        (m.name, *column): statistics.fmean(of_runs)
        for m in shown
        for column in columns
        if (of_runs := values(m, *column))
    }
    best = _best_cells(shown, columns, means) if len(shown) > 1 else set()
    note = "" if novel else kept_parts({algorithm_of(m): keeps_of(m) for m in shown})
    clients = "novel clients, which never trained" if novel else "the training clients"
    caption = (
        f"Mean over {clients}, each counting the same, at the last round{_split(shown)}"
        + ("; ± standard deviation over seeds" if any(len(m.finished) > 1 for m in shown) else "")
        + (". Best in bold" if len(shown) > 1 else "")
        + (". In grey: printed in the paper" if printed and not novel else "")
        + (f". Global prediction: {escape(note)}" if note else "")
    )
    costs = [] if novel else ["sent per client and round", "training"]
    lines = [
        f'<table class="results"><caption><span>{caption}.</span></caption><thead>',
        _head(metrics, columns, costs),
    ]
    for m in shown:
        cells = [
            _cell(
                values(m, *column),
                column[1],
                (m.name, *column) in best,
                printed.get(m.name, {}).get(column),
                column[1] == metrics[0],
            )
            for column in columns
        ]
        cells += [] if novel else [_number(_sent(m)), _number(_training_time(m))]
        dot = f'<span class="dot" style="background:{m.style.colour}"></span>'
        head = f'<th scope="row">{dot}{escape(m.name)}</th>'
        lines.append(f"<tr>{head}{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


Column = tuple[str, str]
"""(task, metric)."""


def _best_cells(
    methods: Sequence[Method],
    columns: Sequence[Column],
    means: Mapping[tuple[str, str, str], float],
) -> set[tuple[str, str, str]]:
    """Return the cells (method, task, metric) with the best mean of their column."""
    best = set()
    for column in columns:
        rivals = [
            (m.name, *column)
            for m in methods
            if competes(keeps_of(m), column[0]) and (m.name, *column) in means
        ]
        if rivals:
            value = best_of(column[1], [means[cell] for cell in rivals])
            best |= {cell for cell in rivals if means[cell] == value}
    return best


def _head(metrics: Sequence[str], columns: Sequence[Column], costs: Sequence[str]) -> str:
    """Return the two rows above the results: tasks, and metrics."""
    tasks = "".join(
        f'<th colspan="{len(metrics)}" scope="colgroup" class="task">{escape(name)}</th>'
        for name in TASKS.values()
    )
    cost_cells = "".join(
        f'<th rowspan="2" scope="col" class="number">{escape(name)}</th>' for name in costs
    )
    metric_cells = "".join(
        f'<th scope="col" class="number{" first" if metric == metrics[0] else ""}">'
        f'<abbr title="{escape(LONG.get(metric, metric))}">{escape(NAMES.get(metric, metric))}'
        "</abbr></th>"
        for _, metric in columns
    )
    return (
        f'<tr><th rowspan="2" scope="col">method</th>{tasks}{cost_cells}</tr>'
        f"<tr>{metric_cells}</tr></thead><tbody>"
    )


def keeps_of(method: Method) -> str:
    """Return which part of their model the clients of a method keep; empty for none."""
    return str((method.finished[0].result or {}).get("keeps", "")) if method.finished else ""


def algorithm_of(method: Method) -> str:
    """Return the algorithm of a method's runs."""
    return str((method.finished[0].result or {})["algorithm"]) if method.finished else ""


def _split(methods: Sequence[Method]) -> str:
    """Say on which examples the methods were evaluated, if not all on test examples."""
    methods_of_split: dict[str, list[str]] = {}
    for m in methods:
        split = str((m.finished[0].result or {}).get("split"))
        methods_of_split.setdefault(split, []).append(m.name)
    if methods_of_split.keys() <= {"test", "None"}:
        return ""
    parts = [
        f"{split} examples" + (f" ({listed(names)})" if len(methods_of_split) > 1 else "")
        for split, names in methods_of_split.items()
    ]
    return escape(f", on {listed(parts)}")


def _cell(
    of_runs: Sequence[float],
    metric: str,
    best: bool,
    paper: tuple[float, float | None] | None,
    first: bool,
) -> str:
    if not of_runs:
        return '<td class="number">–</td>'
    text = metric_text(metric, statistics.fmean(of_runs))
    text = f"<strong>{text}</strong>" if best else text
    if len(of_runs) > 1:
        text += f'<br><span class="spread">±{metric_text(metric, statistics.stdev(of_runs))}</span>'
    if paper is not None:
        spread = f" ±{metric_text(metric, paper[1])}" if paper[1] is not None else ""
        text += f'<br><span class="paper">paper {metric_text(metric, paper[0])}{spread}</span>'
    return f'<td class="number{" first" if first else ""}">{text}</td>'


def _sent(method: Method) -> str:
    sent = (method.finished[0].result or {})["communication"]["per_client_round"]
    return f"↓ {data_size(sent['down_bytes'])} ↑ {data_size(sent['up_bytes'])}"


def _training_time(method: Method) -> str:
    seconds = [(run.result or {})["seconds"]["train"] for run in method.finished]
    return duration(statistics.fmean(seconds))


def _number(text: str) -> str:
    return f"<td class=number>{escape(text)}</td>"


def worst_clients(method: Method) -> str:
    """Return the HTML of a table of the clients with the worst personalised metric.

    It has the metric before and after personalisation, and the clients' training examples.
    """
    run = method.first
    per_client = run.per_client
    keys = [key for key in per_client if key != "client"]
    if len(keys) < 2:
        return ""
    metric = keys[0].partition("_")[2]
    before, after = (per_client[f"{task}_{metric}"] for task in ("global", "personalised"))
    names = per_client.get("client", list(range(len(before))))
    evaluated = [k for k in range(len(after)) if after[k] is not None]
    order = sorted(evaluated, key=lambda k: after[k], reverse=metric == "rmse")[:NUM_WORST]
    clients = (run.evaluation or {}).get("clients") or {}
    place = {name: k for k, name in enumerate(clients.get("client", []))}
    rows = []
    for k in order:
        size, labels = "", ""
        if names[k] in place:
            size = str(clients["sizes"][place[names[k]]])
            if clients.get("labels"):
                labels = _labels_text(clients["labels"][place[names[k]]])
        texts = [metric_text(metric, before[k]), metric_text(metric, after[k]), size]
        cells = "".join(map(_number, texts)) + (f"<td>{escape(labels)}</td>" if labels else "")
        rows.append(f'<tr><th scope="row">{escape(str(names[k]))}</th>{cells}</tr>')
    head = ["client", f"global {NAMES.get(metric, metric)}", "personalised", "training examples"]
    head += ["labels (examples)"] if clients.get("labels") else []
    titles = "".join(
        f'<th scope="col"{"" if k in (0, 4) else " class=number"}>{escape(text)}</th>'
        for k, text in enumerate(head)
    )
    caption = f"The clients that {escape(method.name)} serves worst, seed {run.seed}"
    return (
        f"<table><caption><span>{caption}</span></caption><thead><tr>{titles}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _labels_text(counts: Sequence[int]) -> str:
    """Write the labels that a client holds, with their numbers of examples, the largest first."""
    held = sorted(
        (label for label, count in enumerate(counts) if count), key=lambda label: -counts[label]
    )
    text = ", ".join(f"{label} ({counts[label]})" for label in held[:MAX_LABELS])
    return text + (" …" if len(held) > MAX_LABELS else "")
