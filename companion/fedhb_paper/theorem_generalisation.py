"""Kind `theorem_generalisation`: Theorem 2 (thm:generalisation) on functions that are known.

As their data grow, the clients' learned p(y | x) come near the true ones. True functions are small
networks whose weights are spread around common ones. NIW is fitted to n noisy examples per client,
for every n in turn, and the squared Hellinger distance to the truth is averaged over inputs, the
clients' posteriors q_i and clients. A record is one seed: one truth, and every n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from fedhb.algorithms import NIW, Arrays, Federation, Problem, objectives
from fedhb.algorithms.toolbox import start_weights
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.report.figures import Figure
from fedhb.runs.fit import fit
from fedhb.runs.run import Run
from fedhb.seeding import SERVER, Randomness, derive
from fedhb_paper import pictures
from fedhb_paper.block_descent import slope
from fedhb_paper.hellinger import Array, Backbone, certificate, log_ratio, squared_hellinger
from fedhb_paper.stale_records import on_one_grid, star

Settings = Mapping[str, Any]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Truth:
    """The clients' true functions: networks with one hidden layer, weights [N, ...]."""

    first: Array
    shift: Array
    second: Array
    offset: Array

    @classmethod
    def draw(cls, chosen: Settings, rng: np.random.Generator) -> Truth:
        """Draw common weights, then every client's weights around them."""
        count, inputs, hidden = chosen["num_clients"], chosen["inputs"], chosen["true_hidden"]
        common: list[Any] = [
            rng.normal(size=(inputs, hidden)),
            rng.normal(size=hidden),
            1.5 * rng.normal(size=hidden) / math.sqrt(hidden),
        ]
        spread = chosen["client_deviation"]
        return cls(
            *[w + spread * rng.normal(size=(count, *w.shape)) for w in [*common, np.zeros(())]]
        )

    def __call__(self, x: Array) -> Array:
        """Return f^i(x_i) [N, n] for inputs [N, n, inputs]."""
        z = np.tanh(np.einsum("cnk,ckh->cnh", x, self.first) + self.shift[:, None])
        return np.einsum("cnh,ch->cn", z, self.second) + self.offset[:, None]


def resolved(settings: Settings, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record's cell, and all of its algorithm's."""
    chosen = {**settings, **settings["cells"][key["cell"]]}
    left_out = ("title", "seeds", "cells", "variants")
    algorithm = {
        f"niw.{name}": value for name, value in vars(algorithm_of(settings, key["variant"])).items()
    }
    return {name: value for name, value in chosen.items() if name not in left_out} | algorithm


def algorithm_of(settings: Settings, variant: str) -> NIW:
    """Return the printed model, for clients that all take part in every round.

    `average` is of personalisation and is not used here.
    """
    chosen: Settings = {"kl_weight": 1.0, "num_samples": 0} | settings["variants"][variant]
    return NIW(begin="last", update="body", dof="full", average=0.5, **chosen)


def work(settings: Settings) -> list[dict[str, Any]]:
    """Return a key for each cell, variant and seed."""
    return [
        {"cell": cell, "variant": variant, "seed": seed}
        for cell, values in settings["cells"].items()
        for variant in values.get("variants", settings["variants"])
        for seed in settings["seeds"]
    ]


def run(
    settings: Settings,
    key: Mapping[str, Any],
    folder: Path | None,
    tell: Callable[[float, str], Any],
) -> dict[str, Any]:
    """Fit and measure for every n, with the first n of the same examples.

    It takes half a minute, so nothing is kept in `folder`.
    """
    chosen = {**settings, **settings["cells"][key["cell"]]}
    algorithm = algorithm_of(settings, key["variant"])
    rng = np.random.default_rng([key["seed"], 0x7E0])
    truth, shape = (
        Truth.draw(chosen, rng),
        (chosen["num_clients"], max(chosen["sizes"]), chosen["inputs"]),
    )
    x = rng.uniform(-2, 2, size=shape)
    y = truth(x) + chosen["noise"] * rng.normal(size=shape[:2])
    seen = rng.uniform(-2, 2, size=(1, chosen["test_inputs"], chosen["inputs"])).repeat(
        shape[0], axis=0
    )
    rows: list[dict[str, Any]] = []
    for k, n in enumerate(chosen["sizes"]):
        data = x[:, :n], y[:, :n]
        trained = train(chosen, algorithm, *data, key["seed"])
        rows.append({"n": n} | measure(chosen, trained, truth, *data, seen, key["seed"]))
        tell((k + 1) / len(chosen["sizes"]), f"n = {n}: {rows[-1]['hellinger']:.4f}")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return columns | {"weights": trained.problem.network.num_params}


def train(chosen: Settings, algorithm: NIW, x: Array, y: Array, seed: int) -> Run:
    """Fit NIW to the whole network, with every client in every round.

    Each client goes on from its own last iterate: this is block-coordinate descent.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        model = nn.Sequential(
            nn.Linear(chosen["inputs"], chosen["hidden"]), nn.Tanh(), nn.Linear(chosen["hidden"], 1)
        )
    clients = Clients.from_arrays(list(zip(x, y, strict=True)))
    n, steps = x.shape[1], chosen["steps_per_round"]
    batch = min(max(chosen["batch_size"], math.ceil(n / steps)), n)
    epochs = max(1, round(steps * batch / n))
    return fit(
        model,
        clients,
        algorithm,
        rounds=chosen["rounds"],
        fraction=1.0,
        local_epochs=epochs,
        batch_size=batch,
        lr=chosen["lr"],
        momentum=chosen["momentum"],
        seed=seed,
        head="",
        likelihood=GaussianRegression(noise=chosen["noise"]),
        evaluate_on=None,
        workers=1,
        progress=False,
    )


def measure(
    chosen: Settings, trained: Run, truth: Truth, x: Array, y: Array, seen: Array, seed: int
) -> dict[str, Any]:
    """Measure distances to the truth, and certificates of them.

    Args:
        chosen: the settings of the cell.
        trained: the run on the training data.
        truth: the true functions.
        x, y: the training data [N, n, inputs], [N, n], which the certificates need.
        seen: the inputs [N, k, inputs] of the distances.
        seed: of the record.
    """
    problem, algorithm, server = trained.problem, trained.algorithm, trained.state.server
    assert isinstance(algorithm, NIW)
    m = torch.stack([trained.state.store.memories[i]["m"] for i in range(len(x))])
    noise, count, right, rng = (
        chosen["noise"],
        chosen["samples"],
        truth(seen),
        Randomness(derive(seed, "measure")),
    )

    def distance(theta: Tensor) -> float:
        return float(squared_hellinger(outputs(problem, theta, seen), right, noise).mean())

    of_clients = sample_clients(
        problem, m, algorithm.p_do, algorithm.eps, count, rng(SERVER, "own")
    )
    of_server = algorithm.sample(problem, server, count, rng(SERVER, "global")).to(m.dtype)
    result: dict[str, Any] = {
        "hellinger": float(np.mean([distance(theta) for theta in of_clients])),
        "at_mean": distance(m),
        "global": float(np.mean([distance(theta.expand_as(m)) for theta in of_server])),
    }
    # the certificates are for Gaussian q_i, whose KL is exact
    smooth = replace(algorithm, p_do=1.0)
    true_y = truth(x)
    for name, counts, widths in (
        ("printed", problem.federation.num_examples, [algorithm.eps]),
        ("best", len(x), chosen["widths"]),
    ):
        options = []
        for eps in widths:
            kl = joint_kl(replace(smooth, eps=eps), problem, m, counts)
            drawn = sample_clients(problem, m, 1.0, eps, count, rng(SERVER, f"width {eps}"))
            ratios = [log_ratio(y, outputs(problem, theta, x), true_y, noise) for theta in drawn]
            ratio = float(np.mean([each.sum() for each in ratios]))
            value = certificate(x.shape[1], len(x), -ratio / 2, kl, chosen["zeta"])
            mean_distance = float(np.mean([distance(theta) for theta in drawn]))
            options.append((value, eps, mean_distance, kl / len(x), -ratio / len(x)))
        result[name] = dict(
            zip(("certificate", "eps", "hellinger", "kl", "loss"), min(options), strict=True)
        )
    return result


def outputs(problem: Problem, theta: Tensor, x: Array) -> Array:
    """Return f_theta_i(x_i) [N, n] for theta [N, d] and inputs [N, n, inputs]."""
    with torch.no_grad():
        weights = start_weights(problem, theta, {}, len(theta))
        values = problem.network.outputs(weights, torch.from_numpy(x.astype(np.float32)))
        return values[..., 0].double().numpy()


def sample_clients(
    problem: Problem, m: Tensor, p_do: float, eps: float, count: int, generator: torch.Generator
) -> list[Tensor]:
    """Draw all clients' weights [N, d] `count` times, from the spiky mixtures q_i (eq:spiky2)."""
    columns, drawn = problem.network.columns, []
    drops = columns.drops(p_do, generator) if p_do < 1.0 else None
    for _ in range(count):
        theta = m.clone()
        if drops is not None:
            pairs = [(i, column) for i in range(len(m)) for column in next(drops)]
            for column in columns.of(theta, pairs):
                column.zero_()
        drawn.append(theta + eps * torch.randn(m.shape, generator=generator))
    return drawn


def joint_kl(algorithm: NIW, problem: Problem, m: Tensor, counts: int) -> float:
    """Return KL(q(phi) prod_i q_i || p(phi) prod_i p(theta_i | phi)) for q_i = N(m_i, eps^2 I).

    q(phi) has its best m0 and V0. l0 and n0 have `counts` added to the prior's: |D| is what the
    paper says, and N what conjugacy gives, because q(phi) has seen N weight vectors.
    """
    seen = Problem(problem.network, problem.likelihood, Federation(len(m), counts))
    start: Arrays = {"m0": m.mean(0), "V0": torch.ones_like(m[0])}
    rng = Randomness(0)
    sums = algorithm.summarise(seen, start, {"m": m, "examples": torch.ones(len(m))}, rng)
    server = algorithm.aggregate(seen, start, sums, rng)
    entropy = m.numel() / 2 * math.log(2 * math.pi * math.e * algorithm.eps**2)
    return float(objectives.server_objective(algorithm, seen, server, m)) - entropy


def tables(settings: Settings, printed: Any, records: Sequence[Record]) -> list[Table]:
    """Return every cell's distances, slopes and bounds; the paper prints no numbers."""
    shown = []
    for cell in settings["cells"]:
        chosen = {**settings, **settings["cells"][cell]}
        of_cell = on_one_grid([r for r in records if r["key"]["cell"] == cell], "n")
        variants = {
            variant: [r for r in of_cell if r["key"]["variant"] == variant]
            for variant in chosen["variants"]
        }
        rows = [
            (f"{variant}{star(of_variant)}", [r["result"] for r in of_variant])
            for variant, of_variant in variants.items()
            if of_variant
        ]
        if rows:
            shown += [_distances(cell, rows), _bounds(cell, chosen, rows)]
    return shown


def figures(settings: Settings, printed: Any, records: Sequence[Record]) -> list[Figure]:
    """Return figures of every cell's distances against n, with the first variant's certificates."""
    shown = []
    for cell in settings["cells"]:
        chosen = {**settings, **settings["cells"][cell]}
        lines: dict[str, list[Any]] = {}
        of_cell = on_one_grid([r for r in records if r["key"]["cell"] == cell], "n")
        for variant in chosen["variants"]:
            results = [r["result"] for r in of_cell if r["key"]["variant"] == variant]
            if results and not lines:
                lines["best certificate"] = [
                    [entry["certificate"] for entry in r["best"]] for r in results
                ]
                lines[f"{variant}, global"] = [r["global"] for r in results]
            if results:
                lines[variant] = [r["hellinger"] for r in results]
        if lines:
            shown.append(pictures.distances(cell, of_cell[0]["result"]["n"], lines))
    return shown


def _distances(cell: str, rows: list[tuple[str, list[Any]]]) -> Table:
    table = Table(
        title=f"{cell}: mean squared Hellinger distance (in 1/1000), mean ± deviation over seeds"
    )
    for name in (
        "posterior",
        *(f"n = {n}" for n in rows[0][1][0]["n"]),
        "slope",
        "slope, n >= 256",
    ):
        table.add_column(name, justify="left" if name == "posterior" else "right")
    for variant, results in rows:
        for part, label in (("hellinger", variant), ("global", f"{variant}, global")):
            values = np.array([r[part] for r in results])
            slopes = [
                [slope(r["n"][k:], r[part][k:]) for r in results]
                for k in (0, _late(results[0]["n"]))
            ]
            table.add_row(
                label,
                *(
                    f"{1000 * a:.2f} ±{1000 * b:.2f}"
                    for a, b in zip(values.mean(0), deviation(values), strict=True)
                ),
                *(f"{np.mean(s):.2f} ±{deviation(np.array(s)):.2f}" for s in slopes),
            )
    return table


def _bounds(cell: str, chosen: Settings, rows: list[tuple[str, list[Any]]]) -> Table:
    """Return a table of the first variant's distances beside bounds on them.

    They are the certificates, and the theorem's terms with the smallest constants of its proof.
    """
    variant, results = rows[0]
    net = Backbone(1, chosen["hidden"], chosen["inputs"], results[0]["weights"])
    sizes = results[0]["n"]
    table = Table(title=f"{cell}, {variant}: bounds on the distance (above 1 they say nothing)")
    table.add_column("")
    for n in (*(f"n = {n}" for n in sizes), "slope"):
        table.add_column(n, justify="right")

    def row(label: str, values: Sequence[float]) -> None:
        rate = f"{slope(sizes, list(values)):.2f}" if min(values) > 0 else ""
        table.add_row(label, *(f"{v:.2g}" for v in values), rate)

    def mean(name: str, part: str, of: Sequence[Any] = results) -> list[float]:
        return np.mean([[entry[part] for entry in r[name]] for r in of], axis=0).tolist()

    row("distance", np.mean([r["hellinger"] for r in results], axis=0).tolist())
    row("certificate of q as printed", mean("printed", "certificate"))
    row("best certificate", mean("best", "certificate"))
    row("  its eps", mean("best", "eps"))
    row("  distance of that q", mean("best", "hellinger"))
    for other, values in rows[1:]:
        row(f"best certificate, {other}", mean("best", "certificate", values))
    row("r_n", [net.r_n(n) for n in sizes])
    row("C' r_n, C' = 1 / sigma^2", [net.r_n(n) / chosen["noise"] ** 2 for n in sizes])
    row("eps_n^2, delta = 1", [net.eps_n2(n) for n in sizes])
    row(
        "KL of the proof's reference / n",
        [
            net.reference_kl(n, chosen["weight_bound"], chosen["client_deviation"]) / n
            for n in sizes
        ],
    )
    return table


def deviation(values: Array) -> Any:
    """Return the standard deviation over the first axis; 0 for one value."""
    return values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])


def _late(sizes: Sequence[int]) -> int:
    """Return the position where n >= 256 begins; 0 if fewer than three are so large."""
    late = [k for k, n in enumerate(sizes) if n >= 256]
    return late[0] if len(late) >= 3 else 0
