"""EmpiricalBayes: a run with a learned prior, and what holds clients in its rounds and after them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import RNG, aggregate, labelled, mlp, niw, normal, plan_of, vector_problem
from torch import Tensor

import fedhb
from fedhb.algorithms import EmpiricalBayes, Federation, Problem
from fedhb.algorithms.empirical_bayes import curvature, model, variance
from fedhb.errors import InputError
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network


def test_a_run_learns_its_prior_and_pulls_the_head() -> None:
    clients, module = labelled(9, 6, 4, 7, 8), mlp(4, 5, 3)
    algorithm = EmpiricalBayes(kl_weight=1.0, num_samples=0, update="full", p_do=1.0)
    settings = {
        "rounds": 3,
        "fraction": 0.6,
        "batch_size": 4,
        "local_epochs": 6,
        "seed": 3,
        "progress": False,
    }
    run = fedhb.fit(module, clients, algorithm, **settings)
    V0, evidence = run.state.server["V0"], variance.Evidence.of(run.state.server)
    assert V0.shape == (4,) and evidence.answers.tolist() == [9.0] * 4
    assert (evidence.scatter > 0).all() and (evidence.measured >= 3).all()
    n0 = clients.num_examples + 3.0
    torch.testing.assert_close(V0.double(), n0 * variance.best_variance(evidence))
    assert run.records[-1]["penalty_share"] > 0
    # the pull on the head is 1 / (u |D_i|), towards the shared head
    pull = algorithm.head_pull(
        run.problem, algorithm.broadcast(run.state.server, [0]), torch.tensor([10.0])
    )
    assert pull is not None and torch.equal(pull.target, run.state.server["head"])
    assert pull.layers == [15, 3]
    torch.testing.assert_close(pull.mu, (n0 / V0[2:].double() / 10.0).unsqueeze(0))


def test_dropout_does_not_shrink_a_learned_model() -> None:
    """Its clients have no spike at zero: m0 is the plain mean."""
    clients, module = labelled(9, 6, 4), mlp(4, 5, 3)
    options: Any = {"rounds": 30, "fraction": 1.0, "lr": 1e-9, "seed": 3, "progress": False}
    start = Network(module).theta
    run = fedhb.fit(module, clients, EmpiricalBayes(p_do=0.9), **options)
    torch.testing.assert_close(run.state.server["m0"], start, rtol=0.0, atol=1e-4)


def test_without_a_measurement_the_prior_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = curvature.measure

    def nothing(*given: Any) -> Any:
        return {key: torch.zeros_like(value) for key, value in measure(*given).items()}

    monkeypatch.setattr(model.curvature, "measure", nothing)
    run = fedhb.fit(
        mlp(4, 5, 3),
        labelled(9, 6, 4),
        EmpiricalBayes(prior_scale=0.5),
        rounds=2,
        fraction=1.0,
        seed=3,
        progress=False,
    )
    server = run.state.server
    assert server["V0"].tolist() == server["personal_V0"].tolist() == [0.25 * (19 + 3)] * 4


def test_rounds_and_personalisation_have_a_variance_each() -> None:
    """Held by a variance of nearly zero a client stays at m0: each use is held by its own, and not
    by the other's.
    """
    clients, network, algorithm = labelled(9, 6, 4), Network(mlp(4, 5, 3)), EmpiricalBayes(p_do=1.0)
    problem, plan = (
        Problem(network, Categorical(3), Federation(3, 19, 3)),
        dataclasses.replace(plan_of(2, 4), train_head=True),
    )
    server = algorithm.start(problem, RNG)
    for held in ("V0", "personal_V0"):
        now = server | {held: torch.full_like(server[held], 1e-12)}
        moved = {
            "V0": algorithm.local_update(
                problem, algorithm.broadcast(now, range(3)), clients, {}, plan, RNG
            )[0]["m"],
            "personal_V0": algorithm.personalise(problem, now, clients, {}, plan, RNG).theta,
        }
        for key, m in moved.items():
            assert ((m - server["m0"]).abs().max() < 1e-6) == (key == held), (key, held)


def test_a_likelihood_that_cannot_draw_targets_is_refused_before_the_first_round() -> None:
    class Own:
        num_outputs = 3
        loss, score, predictive = Categorical.loss, Categorical.score, Categorical.predictive

    with pytest.raises(InputError, match=r"Own.*sample"):
        EmpiricalBayes().start(Problem(Network(mlp(4, 5, 3)), Own(), Federation(1, 4, 3)), RNG)  # type: ignore[arg-type]


def test_the_evidence_and_the_last_step_stay_with_the_server() -> None:
    problem, algorithm = vector_problem(5, num_clients=3, num_examples=20), EmpiricalBayes()
    server = algorithm.start(problem, RNG)
    sent = algorithm.broadcast(server, [0])
    assert server.keys() - sent.keys() == {"evidence", "gradients", "last_step", "omega"}
    assert sent.keys() == {"m0", "V0", "personal_V0"}


def test_samples_are_those_of_one_niw_for_each_weight() -> None:
    """With a V0 for each tensor, like the printed model with the same V0 for each coordinate."""
    problem = vector_problem(5, num_clients=3, num_examples=20)
    m0, u = normal(5, seed=1), torch.tensor([0.3], dtype=torch.float64)
    learned = {"m0": m0, "V0": 23.0 * u}
    printed = {"m0": m0, "V0": (23.0 * u).expand(5)}
    draws = [
        algorithm.sample(problem, server, 4, torch.Generator().manual_seed(2))
        for algorithm, server in (
            (EmpiricalBayes(lambda0=1.0), learned),
            (niw(dof="per_coordinate", lambda0=1.0), printed),
        )
    ]
    assert torch.equal(*draws)


def test_a_report_shows_the_learned_deviation_of_each_tensor() -> None:
    problem, algorithm = vector_problem(5, num_clients=3, num_examples=20), EmpiricalBayes()
    server = {"V0": torch.tensor([23.0 * 0.09], dtype=torch.float64)}
    assert algorithm.describe(problem, server)["prior_deviation"] == pytest.approx([0.3])


def test_clients_that_begin_elsewhere_move_m0_as_the_prior_on_mu_says() -> None:
    """Their steps say nothing of the way from m0: the prior N(0, Sigma / lambda0) on mu shortens
    the mean itself, as in the closed form.
    """
    problem, m = vector_problem(4, num_clients=6, num_examples=30), normal(6, 4, seed=3)
    algorithm = EmpiricalBayes(begin="last", lambda0=2.0)
    server = algorithm.start(problem, RNG)
    answers = {"m": m, "examples": torch.ones(6, dtype=torch.float64)}
    answers |= {key: torch.zeros(6, 1, dtype=torch.float64) for key in model.MEASURED}
    summary = algorithm.summarise(problem, server, answers, RNG)
    new = algorithm.aggregate(problem, server, summary, RNG)
    torch.testing.assert_close(new["m0"], 6 / 8 * m.mean(0), rtol=0, atol=1e-14)
    alone = aggregate(niw(lambda0=2.0, p_do=1.0), problem, niw().start(problem, RNG), m)
    torch.testing.assert_close(new["m0"], alone["m0"], rtol=0, atol=1e-14)


def personal_of(run: Any, x: Any, y: Any, epochs: int) -> Tensor:
    return run.personalise(x.numpy(), y.numpy(), epochs=epochs).posterior.theta[0, 0]


def test_averaged_iterates_are_the_personal_mean() -> None:
    """With one step an epoch and all of them averaged, m is the mean of the iterates of runs of 1,
    2, 3 epochs.
    """
    clients, module = labelled(6, 6, 6), mlp(4, 5, 3)
    settings = {
        "rounds": 1,
        "batch_size": 6,
        "seed": 3,
        "progress": False,
        "personal_lr": 0.1,
        "personal_epochs": 3,
    }
    plain, averaged = (
        fedhb.fit(
            module, clients, EmpiricalBayes(average=share, p_do=1.0, num_samples=0), **settings
        )
        for share in (0.0, 1.0)
    )
    x, y = clients.train.examples(0)
    mean = torch.stack([personal_of(plain, x, y, epochs) for epochs in (1, 2, 3)]).mean(0)
    torch.testing.assert_close(personal_of(averaged, x, y, 3), mean)
    assert not torch.equal(personal_of(averaged, x, y, 3), personal_of(plain, x, y, 3))
