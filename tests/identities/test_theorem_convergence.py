"""Theorem 1: convex federations, block-coordinate descent on them, and the bounds on it."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from problems import linear, mixture, problem_of, seeded
from torch import Tensor, nn

from fedhb.algorithms import objectives
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import Categorical, GaussianRegression
from fedhb_paper import theorem_convergence
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
from fedhb_paper.convex_federations import ConvexFederation, make

SMALL: dict[str, Any] = {
    "problem_seed": 3, "loss": "gaussian", "num_clients": 4, "dim": 3, "examples": 12, "batch_size": 12, "noise": 0.7,
    "target_noise": 0.7, "mu_deviation": 1.0, "client_deviation": 0.6, "smallest": 0.1,
}  # fmt: skip
CASES = {
    "full": {},
    "minibatch": {"batch_size": 3},
    "logistic": {"loss": "logistic", "batch_size": 4},
}


def small(**options: Any) -> ConvexFederation:
    return make(SMALL | options)


def somewhere(problem: ConvexFederation, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=problem.start().shape)


# ---- the problems


class Logit(nn.Module):
    """Logits (0, w . x): logistic regression as a classifier of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return torch.cat([torch.zeros_like(z), z], dim=-1)


@pytest.mark.parametrize("loss", ["gaussian", "logistic"])
def test_the_objective_is_the_negative_elbo_of_the_mixture_with_one_prototype(loss: str) -> None:
    problem = make(SMALL | {"loss": loss, "smallest": 1.0, "noise": 1.0})
    pairs = [
        (a.reshape(-1, 3), y.reshape(-1))
        for a, y in zip(problem.inputs, problem.targets, strict=True)
    ]
    if loss == "gaussian":
        clients = Clients.from_arrays(pairs)
        library = problem_of(linear(3), clients, GaussianRegression(noise=1.0), head="")
    else:
        clients = Clients.from_arrays([(a, y.astype(int)) for a, y in pairs])
        library = problem_of(seeded(Logit), clients, Categorical(2), head="")
    algorithm = mixture(num_prototypes=1, sigma2=SMALL["client_deviation"] ** 2)
    constants = []
    for seed in range(4):
        x = somewhere(problem, seed)
        theirs = objectives.negative_elbo(
            algorithm, library, {"r": torch.tensor(x[:1])}, clients, torch.tensor(x[1:])
        )
        constants.append(float(theirs) - problem.value(x) / problem.scale)
    # the library keeps inputs in float32: 1e-7 of values near a hundred
    assert constants == pytest.approx([constants[0]] * 4, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_hessian_are_derivatives(case: str) -> None:
    problem = small(**CASES[case])
    x, direction = somewhere(problem), somewhere(problem, 1)
    step = 1e-5
    ahead, behind = x + step * direction, x - step * direction
    rise = (problem.value(ahead) - problem.value(behind)) / (2 * step)
    assert (problem.gradient(x) * direction).sum() == pytest.approx(rise, rel=1e-7)
    bend = (problem.gradient(ahead) - problem.gradient(behind)) / (2 * step)
    np.testing.assert_allclose(
        problem.hessian(x) @ direction.ravel(), bend.ravel(), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("case", ["minibatch", "logistic"])
def test_the_mean_over_minibatches_is_the_objective(case: str) -> None:
    problem = small(**CASES[case])
    x = somewhere(problem)
    each = [
        problem.gradient(x, np.full(problem.num_clients, b)) for b in range(problem.num_batches)
    ]
    np.testing.assert_allclose(np.mean(each, axis=0), problem.gradient(x), atol=1e-14)
    assert np.abs(each[0] - each[1]).max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_every_minibatch_has_a_gradient_that_is_one_lipschitz(case: str) -> None:
    problem = small(**CASES[case])
    assert problem.smoothness() == pytest.approx(1.0)
    rng, ratios = np.random.default_rng(0), []
    for _ in range(200):
        batch = rng.integers(problem.num_batches, size=problem.num_clients)
        x, gap = rng.normal(size=problem.start().shape), rng.normal(size=problem.start().shape)
        for _ in range(20):  # towards the direction of most curvature
            change = problem.gradient(x + 1e-3 * gap, batch) - problem.gradient(x, batch)
            ratios.append(np.linalg.norm(change) / np.linalg.norm(1e-3 * gap))
            gap = change / np.linalg.norm(change)
    assert max(ratios) <= 1.0 + 1e-9
    assert max(ratios) > 0.3  # and the constant is no wild overestimate


@pytest.mark.parametrize("case", CASES)
def test_the_minimiser_is_one(case: str) -> None:
    problem = small(**CASES[case])
    best = problem.minimiser()
    assert np.abs(problem.gradient(best)).max() < 1e-14
    assert np.linalg.eigvalsh(problem.hessian(best))[0] > 0
    for seed in range(5):
        assert problem.value(best + 0.01 * somewhere(problem, seed)) > problem.value(best)


# ---- the algorithm


@pytest.mark.parametrize("selection", ["rounds", "independent"])
@pytest.mark.parametrize("cohort", [1, 2, 4])
def test_every_block_has_its_share_of_the_steps(selection: str, cohort: int) -> None:
    """Each client's block, and the server's, moves in one of kappa steps: the proof needs no more
    of the selection.
    """
    blocks = Blocks(num_clients=4, cohort=cohort, client_steps=4, selection=selection)
    drawn = list(islice(blocks.draw(np.random.default_rng(0)), 300 * blocks.round_length))
    counts = Counter(int(row) for rows in drawn for row in rows)
    for row in range(5):
        share = counts[row] / len(drawn)
        # 1200 or more draws, for rounds in 300 groups: a share has a deviation of at most 0.02
        assert share == pytest.approx(1 / blocks.kappa, abs=0.07)
    assert all(
        len(set(rows)) == len(rows) == (1 if rows[0] == 0 else cohort) for rows in map(list, drawn)
    )


def test_rounds_keep_their_cohort() -> None:
    blocks = Blocks(num_clients=4, cohort=2, client_steps=6)
    drawn = [tuple(rows) for rows in islice(blocks.draw(np.random.default_rng(1)), 9)]
    assert blocks.server_steps == 3 and drawn[:6] == [drawn[0]] * 6 and drawn[6:] == [(0,)] * 3


@pytest.mark.parametrize("case", ["full", "logistic"])
def test_it_reaches_the_minimiser(case: str) -> None:
    """With the printed step, and faster with a step that does not shrink."""
    problem = small(**CASES[case] | {"batch_size": 12, "smallest": 1.0})
    first = problem.value(problem.start()) - problem.value(problem.minimiser())
    path = descend(problem, Blocks(4, 2, 2), [20_000], printed_rule(1.0), np.random.default_rng(0))
    assert path.gap[-1] < 0.01 * first and path.last[-1] < 1e-4 * first
    path = descend(problem, Blocks(4, 2, 2), [5000], lambda t: 1.0, np.random.default_rng(0))
    assert abs(path.last[-1]) < 1e-12


def test_with_full_batches_the_objective_never_rises() -> None:
    """The constants that are known beforehand then hold on the path."""
    problem = small()
    path = descend(
        problem, Blocks(4, 1, 4), list(range(1, 200)), printed_rule(1.0), np.random.default_rng(0)
    )
    assert (np.diff(path.last) <= 1e-15).all()
    D, R = sublevel_constants(problem)
    assert path.distance <= D / 2 and path.gradient <= R


def test_a_step_is_that_of_the_printed_algorithm() -> None:
    """x_u - grad_u f(x) / (L + sqrt(t)), everything else unmoved, and the mean of x^1 .. x^T."""
    problem, blocks = small(), Blocks(4, 2, 2)
    x, total = problem.start(), problem.start()
    for t, rows in enumerate(islice(blocks.draw(np.random.default_rng(5)), 6)):
        gradient, new = problem.gradient(x), x.copy()
        for row in rows:
            new[row] = x[row] - gradient[row] / (1.0 + math.sqrt(t))
        x = new
        total = total + x
    path = descend(problem, blocks, [6], printed_rule(1.0), np.random.default_rng(5))
    lowest = problem.value(problem.minimiser())
    assert path.gap[0] == pytest.approx(problem.value(total / 6) - lowest, rel=1e-12)
    assert path.last[0] == pytest.approx(problem.value(x) - lowest, rel=1e-12)


# ---- the bounds


def mean_gaps(
    problem: ConvexFederation, blocks: Blocks, record: list[int], seeds: int = 6
) -> tuple[np.ndarray, float, float]:
    """The mean gap at each T, and the largest distance and gradient."""
    paths = [
        descend(problem, blocks, record, printed_rule(1.0), np.random.default_rng([s, 9]))
        for s in range(seeds)
    ]
    gap = np.mean([p.gap for p in paths], axis=0)
    return gap, max(p.distance for p in paths), max(p.gradient for p in paths)


@pytest.mark.parametrize("selection", ["rounds", "independent"])
@pytest.mark.parametrize("case", CASES)
def test_the_bounds_hold_at_every_recorded_step(case: str, selection: str) -> None:
    problem = small(**CASES[case])
    for cohort in (1, 4):
        blocks = Blocks(4, cohort, 4, selection)
        record = [1, 2, 3, *grid(1500, blocks.round_length, 12)]
        gap, D, R = mean_gaps(problem, blocks, record)
        for T, value in zip(record, gap, strict=True):
            assert value <= printed_bound(T, blocks.kappa, 1.0, D, R)
            if selection == "rounds":
                assert value <= bound_for_rounds(T, blocks.kappa, 1.0, D, R, blocks.round_length)


def test_long_rounds_break_the_printed_bound_whoever_is_drawn() -> None:
    """While one of two clients works, the gap cannot fall below what the others leave, and the
    bound goes to zero.

    Every seed is above it, so their expectation is; D and R are those of the whole set that the
    iterates can reach.
    """
    problem = make(SMALL | {"num_clients": 2, "dim": 1, "examples": 40, "batch_size": 40, "noise": 1.0, "target_noise": 1.0,
                            "client_deviation": 0.5, "problem_seed": 1})  # fmt: skip
    blocks = Blocks(num_clients=2, cohort=1, client_steps=60_000)
    D, R = sublevel_constants(problem)
    first = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        drawn = int(next(blocks.draw(rng))[0])
        if drawn in first:
            continue
        first.add(drawn)
        # the other blocks do not move, so that the best this client can do alone is a bound from
        # below
        x = problem.start()
        for t in range(2000):
            x[drawn] -= problem.gradient(x)[drawn] / (1.0 + math.sqrt(t))
        left = problem.value(x) - problem.value(problem.minimiser())
        assert np.abs(problem.gradient(x)[drawn]).max() < 1e-12
        assert left > 1.2 * printed_bound(blocks.client_steps, blocks.kappa, 1.0, D, R)
        assert left <= bound_for_rounds(
            blocks.client_steps, blocks.kappa, 1.0, D, R, blocks.round_length
        )
    assert first == {1, 2}


def test_the_bound_for_rounds_is_a_rate_too() -> None:
    """It falls like 1 / sqrt(T), is above the printed one, and grows with the length of a round."""

    def at(T: int, K: int = 8) -> float:
        return bound_for_rounds(T, 3.0, 1.0, 2.0, 0.7, K)

    far = [10**k * 8 for k in range(4, 8)]
    assert slope(far, [at(T) for T in far]) == pytest.approx(-0.5, abs=0.01)
    assert all(at(T) > printed_bound(T, 3.0, 1.0, 2.0, 0.7) for T in far)
    assert at(8**6, K=64) > 5 * at(8**6, K=8)


def test_a_broken_step_rule_diverges_and_breaks_the_bound() -> None:
    problem = small()
    D, R = sublevel_constants(problem)
    blocks = Blocks(4, 4, 1)
    path = descend(problem, blocks, [50, 400], lambda t: 0.3, np.random.default_rng(0))
    assert path.gap[1] > 1e6 * path.gap[0] > 0
    assert path.gap[1] > printed_bound(400, blocks.kappa, 1.0, D, R)
    kept = descend(problem, blocks, [50, 400], printed_rule(1.0), np.random.default_rng(0))
    assert kept.gap[1] < printed_bound(400, blocks.kappa, 1.0, D, R)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_steps": 3}, "whole number"),
        ({"cohort": 9}, "cohort=9"),
        ({"selection": "cyclic"}, "selection='cyclic'"),
    ],
)
def test_bad_blocks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Blocks(**{"num_clients": 4, "cohort": 1, "client_steps": 4} | options)


# ---- the experiment


def test_the_experiment_gives_records_and_tables() -> None:
    settings = SMALL | {
        "seeds": [0, 1], "client_steps": 4, "steps": 200, "recorded": 6, "cohorts": [1, 4], "selections": ["rounds"],
        "cells": {"a": {}, "b": {"loss": "logistic", "batch_size": 3, "cohorts": [4]}},
    }  # fmt: skip
    keys = theorem_convergence.work(settings)
    assert len(keys) == 2 * (2 + 1) and len({json.dumps(key) for key in keys}) == len(keys)
    shares: list[float] = []
    records = []
    for key in keys:
        result = theorem_convergence.run(
            settings, key, None, lambda share, text: shares.append(share)
        )
        records.append({"key": key, "result": json.loads(json.dumps(result))})
    assert shares[-1] == 1.0
    rows = theorem_convergence.summarise(settings, "a", records)
    assert [row["cohort"] for row in rows] == [1, 4] and all(0 < row["ratio"] < 1 for row in rows)
    results = [r["result"] for r in records[:2]]
    gaps = np.mean([r["gap"] for r in results], axis=0)
    D, R = (max(r[name] for r in results) for name in ("distance", "gradient"))
    before = results[0]["distance_before"], results[0]["gradient_before"]
    for name, constants in (("ratio", (D, R)), ("ratio_before", before)):
        expected = [
            g / printed_bound(T, 5.0, results[0]["smoothness"], *constants)
            for T, g in zip(results[0]["steps"], gaps, strict=True)
        ]
        assert rows[0][name] == pytest.approx(max(expected))
    assert theorem_convergence.summarise(settings, "b", records)[0]["ratio_before"] is None
    tables = theorem_convergence.tables(settings, [], records)
    assert [table.row_count for table in tables] == [2, 1]
    assert theorem_convergence.tables(settings, [], []) == []


def test_the_grid_has_ends_of_rounds() -> None:
    assert grid(100, 7, 5) == [7, 14, 28, 49, 98]
