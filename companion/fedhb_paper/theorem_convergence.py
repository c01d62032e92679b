"""Kind `theorem_convergence`: Theorem 1 (thm:converge) on convex federations.

Their minimisers are known. A record is one run of block-coordinate descent: the suboptimality of
the averaged iterate at log-spaced T, and the constants that the bound needs. The tables set the
mean over seeds, which stands for the expectation, against the printed bound and against the bound
that holds for rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedhb.report.figures import Figure
from fedhb_paper import pictures
from fedhb_paper.block_descent import (
    Blocks,
    bound_for_rounds,
    descend,
    grid,
    printed_bound,
    printed_rule,
    slope,
    sublevel_constants,
)
from fedhb_paper.convex_federations import make
from fedhb_paper.stale_records import on_one_grid, star

Settings = Mapping[str, Any]
Record = Mapping[str, Any]

COLUMNS = (
    "blocks",
    "N_f",
    "kappa",
    "T",
    "gap at T",
    "±",
    "printed bound",
    "known beforehand",
    "bound for rounds",
    "slope, last decade",
    "gap of the last iterate",
)


def resolved(settings: Settings, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record's cell: everything it depends on."""
    left_out = ("title", "seeds", "cells", "cohorts", "selections")  # the last two choose variants
    return {
        name: value for name, value in _of(settings, key["cell"]).items() if name not in left_out
    }


def work(settings: Settings) -> list[dict[str, Any]]:
    """Return a key for each cell, way of selecting blocks, N_f and seed."""
    return [
        {"cell": cell, "variant": f"{selection} N_f={cohort}", "seed": seed}
        for cell in settings["cells"]
        for selection in _of(settings, cell)["selections"]
        for cohort in _of(settings, cell)["cohorts"]
        for seed in settings["seeds"]
    ]


def run(
    settings: Settings,
    key: Mapping[str, Any],
    folder: Path | None,
    tell: Callable[[float, str], Any],
) -> dict[str, Any]:
    """Run the algorithm once; it takes seconds, so nothing is kept in `folder`."""
    chosen = _of(settings, key["cell"])
    problem, blocks = make(chosen), _blocks(chosen, key["variant"])
    record = sorted(
        {*grid(chosen["steps"], blocks.round_length, chosen["recorded"]), blocks.client_steps}
    )
    smoothness = problem.smoothness()
    path = descend(
        problem,
        blocks,
        record,
        printed_rule(smoothness),
        np.random.default_rng([key["seed"], 0xB10C]),
        tell,
    )
    result = asdict(path) | {"smoothness": smoothness}
    if problem.num_batches == 1 and problem.loss == "gaussian":
        result |= dict(
            zip(("distance_before", "gradient_before"), sublevel_constants(problem), strict=True)
        )
    return result


def tables(settings: Settings, printed: Any, records: Sequence[Record]) -> list[Table]:
    """Return every cell's gaps and slopes beside the bounds; the paper prints no numbers."""
    shown = []
    for cell in settings["cells"]:
        rows = summarise(settings, cell, records)
        if not rows:
            continue
        table = Table(
            title=f"{cell}: gap = f(mean iterate) - f*, mean over seeds; "
            "beside the bounds: the largest gap / bound"
        )
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "blocks" else "right")
        for row in rows:
            before = "" if row["ratio_before"] is None else f"{row['ratio_before']:.2g}"
            for_rounds = f"{row['ratio_rounds']:.1g}" if row["selection"] == "rounds" else ""
            table.add_row(
                f"{row['selection']}{row['star']}",
                str(row["cohort"]),
                f"{row['kappa']:.3g}",
                str(row["T"]),
                f"{row['gap']:.2e}",
                f"{row['spread']:.0e}",
                f"{row['ratio']:.2g}",
                before,
                for_rounds,
                f"{row['slope']:.2f}",
                f"{row['last']:.1e}",
            )
        shown.append(table)
    return shown


def figures(settings: Settings, printed: Any, records: Sequence[Record]) -> list[Figure]:
    """Return figures of every cell's gaps against T, beside the printed bound."""
    summaries = {cell: summarise(settings, cell, records) for cell in settings["cells"]}
    return [pictures.gaps(settings, cell, rows) for cell, rows in summaries.items() if rows]


def summarise(settings: Settings, cell: str, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each variant of a cell that has records.

    The constants D and R are the largest over all seeds' paths. A ratio is the largest, over
    recorded T, of the mean gap over a bound: over all T for the printed one, over the ends of
    rounds for the other.
    """
    chosen, rows = _of(settings, cell), []
    for variant in dict.fromkeys(key["variant"] for key in work(settings) if key["cell"] == cell):
        of_variant = on_one_grid(
            [r for r in records if (r["key"]["cell"], r["key"]["variant"]) == (cell, variant)],
            "steps",
        )
        results = [r["result"] for r in of_variant]
        if not results:
            continue
        blocks = _blocks(chosen, variant)
        steps, gaps = results[0]["steps"], np.array([r["gap"] for r in results])
        gap = gaps.mean(0)
        L = results[0]["smoothness"]
        D, R = (max(r[name] for r in results) for name in ("distance", "gradient"))
        bounds = [printed_bound(T, blocks.kappa, L, D, R) for T in steps]
        for_rounds = [
            bound_for_rounds(T, blocks.kappa, L, D, R, blocks.round_length) for T in steps
        ]
        ends = [k for k, T in enumerate(steps) if T % blocks.round_length == 0]
        ratio_before = None
        if "distance_before" in results[0]:
            constants = L, results[0]["distance_before"], results[0]["gradient_before"]
            ratio_before = max(
                g / printed_bound(T, blocks.kappa, *constants)
                for T, g in zip(steps, gap, strict=True)
            )
        late = [k for k, T in enumerate(steps) if steps[-1] <= 10 * T]
        rows.append(
            {
                "selection": blocks.selection,
                "star": star(of_variant),
                "cohort": blocks.cohort,
                "kappa": blocks.kappa,
                "T": steps[-1],
                "gap": float(gap[-1]),
                "spread": float(gaps[:, -1].std(ddof=1)) if len(gaps) > 1 else 0.0,
                "ratio": float((gap / bounds).max()),
                "ratio_before": ratio_before,
                "ratio_rounds": float((gap / for_rounds)[ends].max()),
                "slope": slope([steps[k] for k in late], gap[late].tolist()),
                "last": float(np.mean([r["last"][-1] for r in results])),
                "label": f"{blocks.selection}, N_f = {blocks.cohort}",
                "steps": steps,
                "gaps": gap.tolist(),
                "spreads": gaps.std(0, ddof=1).tolist() if len(gaps) > 1 else None,
                "bounds": bounds,
            }
        )
    return rows


def _of(settings: Settings, cell: str) -> dict[str, Any]:
    """Return the settings of a cell."""
    return {**settings, **settings["cells"][cell]}


def _blocks(chosen: Settings, variant: str) -> Blocks:
    selection, cohort = variant.split(" N_f=")
    return Blocks(chosen["num_clients"], int(cohort), chosen["client_steps"], selection)
