"""The prior's variance, learned from rounds: what is measured, by whom, and what a run makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import RNG, initial, labelled, mlp, normal, plan_of, seeded
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import NIW, Federation, Problem
from fedhb.algorithms.empirical_bayes import variances
from fedhb.errors import InputError
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.proximal import Pull
from fedhb.training.sgd import train


def measure(problem: Problem, weights: Weights, *rest: Any) -> Tensor:
    """Return the measurements of clients that found these weights."""
    return variances.measure(
        problem, {"m": weights.theta, "head": weights.head}, weights, *rest, None
    )


def test_layers_are_tensors() -> None:
    network = Network(mlp(4, 5, 3))
    assert variances.layer_sizes(network, False) == [20, 5] and variances.layer_sizes(
        network, True
    ) == [20, 5, 15, 3]
    assert variances.spread(torch.tensor([2.0, 3.0]), [3, 1]).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert variances.means(torch.tensor([[1.0, 3.0, 8.0]]), [2, 1]).tolist() == [[2.0, 8.0]]


def test_a_run_learns_its_prior_and_pulls_the_head() -> None:
    clients, module = labelled(9, 6, 4, 7, 8), mlp(4, 5, 3)
    algorithm = NIW(dof="per_layer", kl_weight=1.0, num_samples=0, update="full", p_do=1.0)
    settings = {
        "rounds": 3,
        "fraction": 0.6,
        "batch_size": 4,
        "local_epochs": 6,
        "seed": 3,
        "progress": False,
    }
    run = fedhb.fit(module, clients, algorithm, **settings)
    V0, seen = run.state.server["V0"], run.state.server["evidence"]
    assert V0.shape == (4,) and seen[0].tolist() == [9.0] * 4 and (seen[[0, 1]] > 0).all()
    n0 = clients.num_examples + 3.0
    torch.testing.assert_close(V0.double(), n0 * variances.best_variance(seen))
    assert run.records[-1]["penalty_share"] > 0
    # the pull on the head is 1 / (u |D_i|), towards the shared head
    pull = algorithm.head_pull(
        run.problem, algorithm.broadcast(run.state.server, [0]), torch.tensor([10.0])
    )
    assert pull is not None and torch.equal(pull.target, run.state.server["head"])
    assert pull.layers == [15, 3]
    torch.testing.assert_close(pull.mu, (n0 / V0[2:].double() / 10.0).unsqueeze(0))


def test_a_pull_per_layer_is_one_per_weight() -> None:
    clients, network = labelled(9, 6), Network(mlp(4, 5, 3))
    layers = variances.layer_sizes(network, False)
    mu, target = (
        torch.tensor([[0.3, 2.0], [0.1, 0.7]], dtype=torch.float64),
        normal(network.num_params, seed=5),
    )
    found = []
    for momentum in (0.0, 0.9):
        for pull in (
            Pull(mu, target, layers=layers),
            Pull(mu.repeat_interleave(torch.tensor(layers), 1), target),
        ):
            plan = plan_of(2, 4, lr=0.2, momentum=momentum)
            weights, _ = train(
                network, Categorical(3), initial(network, 2), clients, plan, RNG, pull=pull
            )
            found.append(weights.theta)
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found[2], found[3], rtol=1e-13, atol=1e-14)
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_time_of_training_is_how_far_a_constant_gradient_goes(momentum: float) -> None:
    sizes = torch.tensor([20, 7, 31])
    times = variances.training_time(
        sizes, dataclasses.replace(plan_of(epochs=3, batch_size=10, lr=0.2), momentum=momentum)
    )
    for n, time in zip(sizes.tolist(), times.tolist(), strict=True):
        place = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.SGD([place], lr=0.2, momentum=momentum)
        for _ in range(3 * -(-n // 10)):
            place.grad = torch.full_like(place, -1.0)  # of the mean loss: n of the summed one
            solver.step()
        assert time * n == pytest.approx(place.item(), rel=1e-12)


def test_some_clients_measure_by_their_own_coins() -> None:
    clients, network = labelled(*[4] * 40), Network(mlp(4, 5, 3))
    problem, plan = (
        Problem(network, Categorical(3), Federation(40, 160, 3)),
        dataclasses.replace(plan_of(1, 4), train_head=True),
    )
    rng = Randomness(0, 2)
    together = measure(problem, initial(network, 40), clients, plan, rng)
    measured = together[:, 0].bool()
    assert 1 <= measured.sum() <= 12  # of 40 coins with 1/10
    assert (together[~measured, 2:] == 0).all() and (together[measured, :10] > 0).all()
    torch.testing.assert_close(
        together[:, 1], variances.training_time(clients.sizes, plan)
    )  # all of them
    alone = [
        measure(problem, initial(network, 1), clients.select([c]), plan, rng)[0] for c in range(40)
    ]
    torch.testing.assert_close(torch.stack(alone), together, rtol=1e-10, atol=0.0)
    assert (
        measure(problem, initial(network, 40), clients, plan, RNG)[:, 0] == 1
    ).all()  # all in the first round


@pytest.mark.parametrize("kind", ["batch norm", "dropout"])
def test_curvature_does_not_depend_on_the_batch(kind: str) -> None:
    """The mean gradient under the model's own targets is zero only if both are taken in the same
    mode.
    """
    middle = nn.BatchNorm1d(5) if kind == "batch norm" else nn.Dropout(0.5)
    network = Network(
        seeded(lambda: nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 3)))
    )
    problem, x = (
        Problem(network, Categorical(3), Federation(1, 32, 3)),
        labelled(32).train.examples(0)[0],
    )
    means = []
    for size in (4, 32):
        plan, generator = (
            dataclasses.replace(plan_of(1, size), train_head=True),
            torch.Generator().manual_seed(size),
        )
        draws = [
            variances.curvature(problem, initial(network, 1), x, plan, generator)
            for _ in range(2000)
        ]
        means.append(torch.stack(draws).mean(0))
    torch.testing.assert_close(means[0], means[1], rtol=0.25, atol=0.0)


def test_dropout_does_not_shrink_a_learned_model() -> None:
    """Its clients have no spike at zero: m0 is the plain mean."""
    clients, module = labelled(9, 6, 4), mlp(4, 5, 3)
    options: Any = {"rounds": 30, "fraction": 1.0, "lr": 1e-9, "seed": 3, "progress": False}
    start = Network(module).theta
    run = fedhb.fit(module, clients, NIW(p_do=0.9), **options)
    torch.testing.assert_close(run.state.server["m0"], start, rtol=0.0, atol=1e-4)


def test_without_a_measurement_the_prior_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedhb.algorithms.niw.measure",
        lambda problem, found, begun, clients, *rest: torch.zeros(len(clients), 23),
    )
    run = fedhb.fit(
        mlp(4, 5, 3),
        labelled(9, 6, 4),
        NIW(prior_scale=0.5),
        rounds=2,
        fraction=1.0,
        seed=3,
        progress=False,
    )
    assert (
        run.state.server["V0"].tolist()
        == run.state.server["personal_V0"].tolist()
        == [0.25 * (19 + 3)] * 4
    )


def test_rounds_and_personalisation_have_a_variance_each() -> None:
    """Held by a variance of nearly zero a client stays at m0: each use is held by its own, and not
    by the other's.
    """
    clients, network, algorithm = labelled(9, 6, 4), Network(mlp(4, 5, 3)), NIW(p_do=1.0)
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

    with pytest.raises(InputError, match=r"Own.*dof=full"):
        NIW().start(Problem(Network(mlp(4, 5, 3)), Own(), Federation(1, 4, 3)), RNG)  # type: ignore[arg-type]


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
    runs = {
        share: fedhb.fit(module, clients, NIW(average=share, p_do=1.0, num_samples=0), **settings)
        for share in (0.0, 1.0)
    }
    x, y = clients.train.examples(0)

    def personal(share: float, epochs: int) -> Tensor:
        return runs[share].personalise(x.numpy(), y.numpy(), epochs=epochs).posterior.theta[0, 0]

    torch.testing.assert_close(
        personal(1.0, 3), torch.stack([personal(0.0, e) for e in (1, 2, 3)]).mean(0)
    )
    assert not torch.equal(personal(1.0, 3), personal(0.0, 3))
