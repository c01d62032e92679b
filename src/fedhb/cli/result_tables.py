"""The tables of results that the commands print."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NOTHING = "the clients have no test examples: nothing was evaluated"
"""Printed in place of numbers, or below a table without any."""


def show_result(console: Console, result: dict[str, Any]) -> None:
    """Print the result of one run."""
    rows = [("global", result["global"]), ("personalised", result["personalised"])]
    if result["holdout"]:
        rows += [
            ("novel clients, global", result["holdout"]["global"]),
            ("novel clients, personalised", result["holdout"]["personalised"]),
        ]
    if result["global"] is None:
        console.print(NOTHING)
        return
    run = (
        f"{result['algorithm']} on {result['dataset']}, seed {result['seed']}, round "
        f"{result['rounds']}"
    )
    each = next(values for key, values in result["per_client"].items() if key != "client")
    missing = sum(value is None for value in each)
    group = f"clients, {result['split']} data"
    if missing:
        group = f"{len(each) - missing} of {len(each)} clients, those with {result['split']} data"
    title = f"{escape(run)}: mean over {group}"
    table = Table("", *result["global"], title=title)
    for label, metrics in rows:
        table.add_row(label, *(f"{v:.4f}" for v in metrics.values()))
    console.print(table)
    if "coverage" in result["global"]:
        from fedhb.likelihood import GaussianRegression  # here: it imports torch

        console.print(
            f"coverage: the share of targets in their {GaussianRegression.level:.0%} intervals",
            highlight=False,
            markup=False,
        )
    if result.get("privacy"):
        spent = result["privacy"]
        console.print(
            f"privacy spent: epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g}, for one "
            "client",
            highlight=False,
        )
    sent = result["communication"]["per_client_round"]
    seconds = result["seconds"]
    console.print(
        f"sent per client and round: {sent['down_bytes'] / 1e6:.3g} MB down, "
        f"{sent['up_bytes'] / 1e6:.3g} MB up; training {seconds['train']:.1f} s, evaluation "
        f"{seconds['evaluate']:.1f} s",
        highlight=False,
    )


def one_line(result: dict[str, Any]) -> str:
    """Return the metrics of a finished run in a line."""
    parts = [
        f"{task} " + "  ".join(f"{k} {v:.4f}" for k, v in result[task].items())
        for task in ("global", "personalised")
        if result[task]
    ]
    return f"{result['algorithm']} seed {result['seed']}: " + (
        "; ".join(parts) or "nothing was evaluated"
    )


def comparison_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return a table of algorithms by metrics, the best of each column in bold."""
    from fedhb.report.tables import best_of, competes, kept_parts

    metrics = [
        (task, m) for task in rows[0] if isinstance(rows[0][task], dict) for m in rows[0][task]
    ]
    rivals = {
        task: [row for row in rows if competes(row.get("keeps", ""), task)] or rows
        for task, _ in metrics
    }
    best = {
        (task, m): best_of(m, [row[task][m]["mean"] for row in rivals[task]]) for task, m in metrics
    }
    table = Table(
        "algorithm",
        title=escape(title),
        caption=kept_parts({r["algorithm"]: r.get("keeps", "") for r in rows} if metrics else {})
        or None,
    )
    for task, m in metrics:
        table.add_column(f"{task.replace('_', ' ')}\n{m}", justify="right")
    table.add_column("training\nseconds", justify="right")
    for row in rows:
        cells = []
        for task, m in metrics:
            value = row[task][m]
            text = f"{value['mean']:.4f}" + (
                f" ±{value['std']:.4f}" if len(row["seeds"]) > 1 else ""
            )
            cells.append(
                f"[bold]{text}[/bold]"
                if row in rivals[task] and value["mean"] == best[task, m]
                else text
            )
        table.add_row(row["algorithm"], *cells, f"{row['seconds']:.1f}")
    return table
