"""The prior of clients that take few steps: which clients tell of it, and what they may say."""

from __future__ import annotations

import pytest
import torch
from problems import labelled, mlp, normal
from torch import Tensor

import fedhb
from fedhb.algorithms import EmpiricalBayes
from fedhb.algorithms.empirical_bayes import few_steps, variance


@pytest.mark.parametrize("begin", ["global", "last"])
def test_only_what_began_at_m0_tells(begin: str) -> None:
    run = fedhb.fit(
        mlp(4, 5, 3),
        labelled(6, 7, 5),
        EmpiricalBayes(begin=begin),
        rounds=2,
        fraction=1.0,
        batch_size=4,
        progress=False,
    )
    assert run.state.server["gradients"].any() == (begin == "global")


def sums(count: float, *reach: float) -> dict[str, Tensor]:
    """Return a cohort's sums of few_steps.ANSWERS, for one tensor, and its count."""
    values = torch.tensor(reach, dtype=torch.float64).unsqueeze(1)
    return {**dict(zip(few_steps.ANSWERS, values, strict=True)), "count": torch.tensor(count)}


def cohort(count: float, *reach: float) -> Tensor:
    """Return what the server keeps of a cohort with these sums of `reach`, and scatter."""
    ones = torch.ones(1, dtype=torch.float64)
    return few_steps.sums_of(5.0 * ones, 2.0 * ones, sums(count, *reach))


def test_a_cohort_of_which_one_took_many_steps_or_that_has_one_client_tells_nothing() -> None:
    told = cohort(3.0, 3.0, 0.3, 0.03, 0.1)
    assert told.flatten().tolist() == pytest.approx(
        [(5.0 - 2.0 / 3.0) / (2.0 / 3.0) * 100, 10.0, 3.0]
    )
    for nothing in (cohort(3.0, 2.0, 0.2, 0.02, 0.1), cohort(1.0, 1.0, 0.1, 0.01, 0.1)):
        assert not nothing.any()


def test_clients_that_are_alike_differ_by_nothing_however_far_each_goes() -> None:
    """They go W_i g: all of X is the share of g, r Y with r = sum W_i^2 / (sum W_i)^2, and not 1/n
    of Y.
    """
    W, g = torch.tensor([0.3, 0.1, 0.05, 0.6], dtype=torch.float64), normal(20, seed=2)
    moved = W.unsqueeze(1) * g
    X, Y = moved.square().sum().view(1), moved.sum(0).square().sum().view(1)
    reached = sums(4.0, 4.0, W.sum().item(), W.square().sum().item(), 0.1)
    told = few_steps.GradientSums(*few_steps.sums_of(X, Y, reached))
    assert told.scatter.item() == pytest.approx(0.0, abs=1e-12) and told.noise > 0
    apart = few_steps.sums_of(X + 1.0, Y, reached)[0].item()
    assert apart == pytest.approx(4.0 / (1.0 - 0.4625 / 1.05**2) / 0.4625)


@pytest.mark.parametrize("W", [0.0, -1.0, 1e-30, 1e30])
@pytest.mark.parametrize("squares", [0.0, -1.0, 1e-10, 1e10])
def test_what_a_client_says_keeps_finite(W: float, squares: float) -> None:
    assert torch.isfinite(cohort(3.0, 3.0, W, squares, 0.1)).all()


def test_gradients_count_up_to_what_there_was() -> None:
    server = variance.unlearned(torch.ones(1, dtype=torch.float64))
    gaps = normal(3, 10, seed=1)
    summary = {"m": gaps.sum(0), "squares": gaps.square().sum(0), "count": torch.tensor(3.0)}
    summary |= sums(3.0, 3.0, 3e-6, 3e-12, 3e-13)
    for key in ("measured", "curvature", "curvature_squares"):
        summary[key] = torch.full((1,), 3.0, dtype=torch.float64)
    for most in (100.0, 1000.0):
        new = variance.learn(server, summary, [10], 1.0, 10.0, most)
        assert new[variance.PERSONAL].item() == most > 10 * new["V0"].item()
