"""What a client measures after its update: by whom, and what does not change it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import RNG, initial, labelled, mlp, plan_of, seeded
from torch import nn

from fedhb.algorithms import Federation, Problem
from fedhb.algorithms.empirical_bayes import curvature
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_time_of_training_is_how_far_a_constant_gradient_goes(momentum: float) -> None:
    sizes = torch.tensor([20, 7, 31])
    times = curvature.training_time(
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
    problem = Problem(network, Categorical(3), Federation(40, 160, 3))
    plan, rng = dataclasses.replace(plan_of(1, 4), train_head=True), Randomness(0, 2)
    together = curvature.measure(problem, initial(network, 40), clients, plan, rng)
    assert together.keys() == curvature.ANSWERS.keys()
    measured = together["measured"][:, 0].bool()
    assert 1 <= measured.sum() <= 12  # of 40 coins with 1/10
    for key in ("curvature", "curvature_squares"):
        assert together[key].shape == (40, 4)
        assert (together[key][~measured] == 0).all() and (together[key][measured] > 0).all()
    torch.testing.assert_close(
        together["time"][:, 0], curvature.training_time(clients.sizes, plan)
    )  # all of them
    alone = [
        curvature.measure(problem, initial(network, 1), clients.select([c]), plan, rng)
        for c in range(40)
    ]
    for key, value in together.items():
        torch.testing.assert_close(
            torch.cat([one[key] for one in alone]), value, rtol=1e-10, atol=0.0
        )
    first = curvature.measure(problem, initial(network, 40), clients, plan, RNG)
    assert (first["measured"] == 1).all()  # all in the first round


@pytest.mark.parametrize("kind", ["batch norm", "dropout"])
def test_curvature_does_not_depend_on_the_batch(kind: str) -> None:
    """The mean gradient under the model's own targets is zero only if both are taken in the same
    mode.
    """
    middle = nn.BatchNorm1d(5) if kind == "batch norm" else nn.Dropout(0.5)
    network = Network(
        seeded(lambda: nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 3)))
    )
    problem = Problem(network, Categorical(3), Federation(1, 32, 3))
    x = labelled(32).train.examples(0)[0]
    means = []
    for size in (4, 32):
        plan = dataclasses.replace(plan_of(1, size), train_head=True)
        generator = torch.Generator().manual_seed(size)
        draws = [
            curvature.curvature(problem, initial(network, 1), x, plan, generator)
            for _ in range(2000)
        ]
        means.append(torch.stack(draws).mean(0))
    torch.testing.assert_close(means[0], means[1], rtol=0.25, atol=0.0)


@pytest.mark.parametrize("examples", [1, 3])
def test_clients_with_few_examples_take_all_of_them_twice(examples: int) -> None:
    """With one half for both, tr(H^2) is that of the same examples: positive and finite."""
    network = Network(mlp(4, 5, 3))
    problem = Problem(network, Categorical(3), Federation(1, examples, 3))
    plan = dataclasses.replace(plan_of(1, 4), train_head=True)
    x = labelled(examples).train.examples(0)[0]
    generator = torch.Generator().manual_seed(0)
    h, squares = curvature.curvature(problem, initial(network, 1), x, plan, generator).chunk(2)
    assert (h > 0).all() and (squares > 0).all() and torch.isfinite(squares).all()
