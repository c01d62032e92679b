"""The server's lengthened step: its factor and its length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import RNG, labelled, mlp, plan_of

from fedhb.algorithms import Arrays, EmpiricalBayes, Federation, Problem
from fedhb.algorithms.empirical_bayes.curvature import training_time
from fedhb.algorithms.empirical_bayes.server_step import (
    FACTOR,
    LAST,
    Stretch,
    along,
    at_rest,
    factor,
    lengthened,
    stretch_of,
)
from fedhb.algorithms.empirical_bayes.variance import Evidence, steepness
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, tensor_sizes
from fedhb.seeding import Randomness


def test_factors_by_hand() -> None:
    g = torch.tensor([3.0, 4.0])
    assert factor(g, torch.zeros(2), 1.7) == 1.0  # nothing to compare with
    assert factor(g, g, 1.0) == 2.0 and factor(2 * g, g, 1.0) == 2.0  # as far as it goes
    assert factor(-g, g, 2.0) == 1.0
    assert factor(torch.tensor([-4.0, 3.0]), g, 1.4) == pytest.approx(
        1.4
    )  # neither for nor against
    assert factor(0.2 * g, g, 1.2) == pytest.approx(1.5)


def test_lengths_at_their_ends() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert along(3 * one, 0 * one, 0.5).item() == 1.0  # no prior
    assert along(3 * one, 2 * one, 0.0).item() == 1.0  # no training
    assert along(1e9 * one, one, 0.5).item() == pytest.approx(1.0)  # the data have the last word
    assert along(4 * one, one, 1e6).item() == pytest.approx(1.25)  # training converges
    assert along(0 * one, 1e9 * one, 0.5).item() == 2.0  # as far as it goes


def rounds_of(update: str, **options: float) -> tuple[EmpiricalBayes, Problem, Any]:
    """Return the algorithm, its problem, and the function that gives a round's sums."""
    network, clients = Network(mlp(4, 6, 3)), labelled(6, 7)
    problem = Problem(network, Categorical(3), Federation(2, 13, 3))
    algorithm, full = EmpiricalBayes(update=update, **options), update == "full"

    def summary_of(server: Arrays, epochs: int, lr: float, number: int = 1) -> Arrays:
        rng, received = Randomness(0, number), algorithm.broadcast(server, [0, 1])
        plan = plan_of(epochs=epochs, lr=lr, train_head=full)
        answers, _ = algorithm.local_update(problem, received, clients, {}, plan, rng)
        summary: Arrays = algorithm.summarise(problem, received, answers, rng)
        return summary

    return algorithm, problem, summary_of


def means_of(server: Arrays, summary: Arrays) -> Arrays:
    """Return the means of the clients' weights: the step of block-coordinate descent."""
    keys = {"m0": "m", "head": "head"}
    return {
        key: server[key] + summary[sums] / summary["count"]
        for key, sums in keys.items()
        if sums in summary
    }


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_servers_step_is_as_long_as_the_prior_asks(update: str) -> None:
    """Tensor by tensor, with the evidence and the prior that the clients were sent; no step before
    it, so none to agree with.
    """
    algorithm, problem, summary_of = rounds_of(update)
    network, sizes = problem.network, tensor_sizes(problem.network, update == "full")
    server = algorithm.start(problem, RNG)
    server["V0"] = torch.full_like(server["V0"], 0.5 * 16.0)  # n0 = 16, a precision of 2
    server["evidence"] = torch.rand(
        5, len(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    summary = summary_of(server, epochs=2, lr=0.3)
    new, means = algorithm.aggregate(problem, dict(server), summary, RNG), means_of(server, summary)
    precision = torch.full((len(sizes),), 2.0, dtype=torch.float64)
    stretch = stretch_of(server, summary, sizes, precision, 0.0)
    omega = stretch.length
    assert not stretch.decay.any()
    plan = plan_of(epochs=2, lr=0.3)
    time = training_time(torch.tensor([6, 7]), plan).mean().item()
    first = along(steepness(Evidence.of(server), sizes), precision, time)
    torch.testing.assert_close(omega[0].item(), first[0].item(), rtol=1e-6, atol=0.0)
    assert omega.unique().numel() > 1 and 1.0 < omega.max() <= 2.0
    assert new[FACTOR].item() == 1.0
    parts = omega.split([network.num_params, len(omega) - network.num_params])
    for key, part in zip(("m0", "head"), parts, strict=True):
        assert (len(part) > 0) == (key in means)
        if len(part):
            torch.testing.assert_close(
                new[key], server[key] + part.to(new[key]) * (means[key] - server[key])
            )
    # of clients that go on from where they were the prior has taken another share
    elsewhere = EmpiricalBayes(update=update, begin="last").aggregate(
        problem, dict(server), summary, RNG
    )
    torch.testing.assert_close(elsewhere["m0"], means["m0"])


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_servers_second_step(update: str) -> None:
    """The first round is that of the closed form; the second moves m0 and the head omega times as
    far.

    None of it is sent. The clients do not begin at m0, so the prior's share asks for nothing.
    """
    algorithm, problem, summary_of = rounds_of(update, begin="last")
    server, steps, omega = algorithm.start(problem, RNG), [], 1.0
    assert not {LAST, FACTOR} & algorithm.broadcast(server, [0]).keys()
    for number in (1, 2):
        summary = summary_of(server, epochs=1, lr=0.02, number=number)
        new, means = algorithm.aggregate(problem, server, summary, RNG), means_of(server, summary)
        steps.append(torch.cat([means[key] - server[key] for key in means]))
        omega = 1.0 if number == 1 else factor(steps[1], steps[0], 1.0)
        assert new[FACTOR].item() == pytest.approx(omega) and torch.allclose(new[LAST], steps[-1])
        assert means.keys() == {"m0", "head"} & server.keys()
        for key in means:
            torch.testing.assert_close(new[key], server[key] + omega * (means[key] - server[key]))
        server = new
    assert omega > 1.0  # or the second round has shown nothing


def test_at_rest_there_was_no_step() -> None:
    server = at_rest([torch.ones(3), torch.ones(2)])
    assert server[LAST].tolist() == [0.0] * 5 and server[FACTOR].tolist() == [1.0]


def test_a_stretch_counts_where_it_is_longer_than_agreement() -> None:
    """And what it decays is lost, whichever of both is longer."""
    start, means = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])
    server = {"m0": start, LAST: torch.tensor([2.0, -0.5]), FACTOR: torch.ones(1)}
    omega = factor(means - start, server[LAST], 1.0)
    assert 1.0 < omega < 2.0
    stretch = Stretch(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.0]))
    new = lengthened(server, {"m0": means}, ["m0"], stretch)
    assert new["m0"].tolist() == pytest.approx([1.0 - 0.1 + omega * 1.0, 2.0 + 2.0 * 2.0])
    plain = lengthened(server, {"m0": means}, ["m0"])
    assert plain["m0"].tolist() == pytest.approx([1.0 + omega, 2.0 + 2.0 * omega])
