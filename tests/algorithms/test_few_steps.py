"""The prior of clients that take few steps: who tells of it."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, labelled, mlp, normal, plan_of
from torch import Tensor

import fedhb
from fedhb.algorithms import NIW, Federation, Problem
from fedhb.algorithms.empirical_bayes import few_steps, variances
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network


def test_a_run_that_was_begun_before_there_were_sums_of_gradients_goes_on_without() -> None:
    clients, problem = (
        labelled(6, 7),
        Problem(Network(mlp(4, 6, 3)), Categorical(3), Federation(2, 13, 3)),
    )
    algorithm, plan = NIW(), plan_of(epochs=1, lr=0.3, train_head=True)
    server = algorithm.start(problem, RNG)
    old = {key: value for key, value in server.items() if key != "gradients"}
    found, _ = algorithm.local_update(
        problem, algorithm.broadcast(server, [0, 1]), clients, {}, plan, RNG
    )
    summary = algorithm.summarise(problem, algorithm.broadcast(server, [0, 1]), found, RNG)
    new, new_old = (algorithm.aggregate(problem, one, summary, RNG) for one in (server, old))
    assert new.keys() - new_old.keys() == {"gradients"} and new["gradients"].all()
    assert all(
        torch.equal(new[key], value) for key, value in new_old.items() if key != "personal_V0"
    )


@pytest.mark.parametrize("begin", ["global", "last"])
def test_only_what_began_at_m0_tells(begin: str) -> None:
    run = fedhb.fit(
        mlp(4, 5, 3),
        labelled(6, 7, 5),
        NIW(begin=begin),
        rounds=2,
        fraction=1.0,
        batch_size=4,
        progress=False,
    )
    assert run.state.server["gradients"].any() == (begin == "global")


def cohort(count: float, *reached: float) -> Tensor:
    """Return what the server keeps of a cohort with these sums of `reach`, and scatter."""
    one = torch.ones(1, dtype=torch.float64)
    return few_steps.seen(
        5.0 * one,
        2.0 * one,
        torch.tensor(count).double(),
        torch.tensor(reached, dtype=torch.float64),
    )


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
    reached = torch.stack(
        [torch.tensor(4.0).double(), W.sum(), W.square().sum(), torch.tensor(0.1).double()]
    )
    told = few_steps.seen(X, Y, torch.tensor(4.0).double(), reached)
    assert told[0].item() == pytest.approx(0.0, abs=1e-12) and told[1] > 0
    apart = few_steps.seen(X + 1.0, Y, torch.tensor(4.0).double(), reached)[0].item()
    assert apart == pytest.approx(4.0 / (1.0 - 0.4625 / 1.05**2) / 0.4625)


@pytest.mark.parametrize("W", [0.0, -1.0, 1e-30, 1e30])
@pytest.mark.parametrize("squares", [0.0, -1.0, 1e-10, 1e10])
def test_what_a_client_says_keeps_finite(W: float, squares: float) -> None:
    assert torch.isfinite(cohort(3.0, 3.0, W, squares, 0.1)).all()


def test_gradients_count_up_to_what_there_was() -> None:
    server = {"m0": torch.zeros(10)} | variances.unlearned(torch.ones(1, dtype=torch.float64))
    gaps = normal(3, 10, seed=1)
    summary = {"m": gaps.sum(0), "squares": gaps.square().sum(0), "count": torch.tensor(3.0)}
    summary["curvature"] = torch.tensor(
        [3.0, 3e-6, 3.0, 3.0, 3.0, 3e-6, 3e-12, 3e-13], dtype=torch.float64
    )
    for most in (100.0, 1000.0):
        new = variances.learn(server, summary, [10], 1.0, 10.0, most)
        assert new[variances.PERSONAL].item() == most > 10 * new["V0"].item()
