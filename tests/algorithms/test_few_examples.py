"""Personalisation with few examples: as many steps as with many, each client as if it were alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import RNG, labelled, mlp, plan_of
from torch import nn

from fedhb.algorithms import NIW, EmpiricalBayes, Federation, Personalised, Problem, hierarchical
from fedhb.algorithms.empirical_bayes import few_examples
from fedhb.algorithms.gaussian import Gaussian
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network


def test_factors_by_hand() -> None:
    """1,000 examples of 10 clients in batches of 10: 10 steps an epoch are usual."""
    federation, plan = Federation(10, 1000, 3), plan_of(1, 10)
    sizes = {
        1: 8,
        10: 8,
        11: 4,
        20: 4,
        31: 2,
        60: 2,
        71: 1,
        100: 1,
        5000: 1,
    }  # 10/1 is nearest to 8, 10/4 to 2, 10/8 to 1
    assert (
        dict(
            zip(
                sizes,
                few_examples.epoch_factors(torch.tensor(list(sizes)), plan, federation),
                strict=True,
            )
        )
        == sizes
    )


def in_given_epochs(algorithm: EmpiricalBayes, problem: Problem, server: Any, *given: Any) -> Any:
    """Personalise in the plan's own epochs, under the personal variance."""
    personal = server | {"V0": server["personal_V0"]}
    found: Personalised = Gaussian.personalise(algorithm, problem, personal, *given)
    return found


def problem_of(clients_in_all: int, examples: int) -> Problem:
    return Problem(Network(mlp(4, 5, 3)), Categorical(3), Federation(clients_in_all, examples, 3))


def test_each_client_is_personalised_as_if_alone_and_in_its_place() -> None:
    clients, problem = labelled(5, 33, 8, 16, 6), problem_of(4, 128)
    algorithm, plan = EmpiricalBayes(p_do=1.0), dataclasses.replace(plan_of(2, 4), train_head=True)
    server = algorithm.start(problem, RNG)
    found = algorithm.personalise(problem, server, clients, {}, plan, RNG)
    factors = few_examples.epoch_factors(clients.sizes, plan, problem.federation)
    assert factors == [4, 1, 4, 2, 4]
    for c, factor in enumerate(factors):
        longer = dataclasses.replace(plan, epochs=2 * factor)
        alone = in_given_epochs(algorithm, problem, server, clients.select([c]), {}, longer, RNG)
        for key, value in alone.arrays().items():
            torch.testing.assert_close(found.arrays()[key][c : c + 1], value, rtol=1e-12, atol=0.0)


def test_with_the_usual_number_of_examples_nothing_changes() -> None:
    clients, problem, plan = (
        labelled(30, 34),
        problem_of(2, 64),
        dataclasses.replace(plan_of(2, 4), train_head=True),
    )
    algorithm = EmpiricalBayes()
    given = (problem, algorithm.start(problem, RNG), clients, {}, plan, RNG)
    either = [algorithm.personalise(*given).theta, in_given_epochs(algorithm, *given).theta]
    assert torch.equal(*either)


@pytest.mark.parametrize(
    ("algorithm", "longer"),
    [
        (EmpiricalBayes(), True),
        (EmpiricalBayes(kl_weight=0.0), False),
        (NIW(update="full"), False),
    ],
)
def test_only_a_learned_prior_has_more_steps(
    monkeypatch: pytest.MonkeyPatch, algorithm: Any, longer: bool
) -> None:
    """Nothing would hold a client with few examples where there is no such prior."""
    seen: list[int] = []
    train = hierarchical.train

    def watched(*args: Any, **more: Any) -> Any:
        seen.append(args[4].epochs)
        return train(*args, **more)

    monkeypatch.setattr(hierarchical, "train", watched)
    problem = problem_of(2, 64)
    plan = dataclasses.replace(plan_of(2, 4), train_head=True)
    algorithm.personalise(problem, algorithm.start(problem, RNG), labelled(4), {}, plan, RNG)
    assert seen == [16 if longer else 2]


def test_few_examples_reach_the_posterior_s_mode() -> None:
    """The objective of a client with 4 examples ends where a tenfold training ends, and far from it
    with the epochs of many.
    """
    clients, problem = labelled(4), problem_of(10, 640)
    plan = dataclasses.replace(plan_of(8, 4, lr=0.02), train_head=True)
    algorithm = EmpiricalBayes(p_do=1.0)
    server = algorithm.start(problem, RNG)

    def ends(personalise: Any, epochs: int) -> torch.Tensor:
        longer = dataclasses.replace(plan, epochs=epochs)
        found = personalise(algorithm, problem, server, clients, {}, longer, RNG)
        return torch.cat([found.theta[0, 0], found.head[0, 0]])

    mode = ends(EmpiricalBayes.personalise, 300)
    gaps = [
        (ends(personalise, 8) - mode).norm()
        for personalise in (EmpiricalBayes.personalise, in_given_epochs)
    ]
    assert gaps[0] < 0.3 * gaps[1]


def test_running_statistics_of_few_examples_are_held_by_those_of_the_federation() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    problem = Problem(Network(net), Categorical(3), Federation(4, 128, 3))
    clients, algorithm, plan = (
        labelled(2, 33),
        EmpiricalBayes(p_do=1.0),
        dataclasses.replace(plan_of(2, 4), train_head=True),
    )
    server = algorithm.start(problem, RNG)
    server["buffers"] = server["buffers"] + 0.5
    found = algorithm.personalise(problem, server, clients, {}, plan, RNG)
    assert few_examples.epoch_factors(clients.sizes, plan, problem.federation) == [8, 1]
    for c, (epochs, own) in enumerate(((16, 2 / 5), (2, 1.0))):
        longer = dataclasses.replace(plan, epochs=epochs)
        alone = in_given_epochs(algorithm, problem, server, clients.select([c]), {}, longer, RNG)
        torch.testing.assert_close(found.theta[c], alone.theta[0], rtol=1e-12, atol=0.0)
        expected = own * alone.buffers[0] + (1 - own) * server["buffers"]
        torch.testing.assert_close(found.buffers[c], expected, rtol=1e-12, atol=1e-14)
    assert (found.buffers[0] - server["buffers"]).abs().max() > 0.01
