"""The prior of clients that take few steps: how far the solver goes, and a truth found again from
where it stopped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import RNG, initial, linear, normal, plan_of
from torch import Tensor

from fedhb.algorithms import Plan
from fedhb.algorithms.contract import Arrays
from fedhb.algorithms.empirical_bayes import few_steps, variance
from fedhb.algorithms.empirical_bayes.curvature import training_time
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.network.vectors import Network
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

PLANS = {
    "one step": (plan_of(1, 50, lr=0.3), 20),
    "a short last batch": (plan_of(1, 16, lr=0.3), 17),
    "batches": (plan_of(1, 5, lr=0.3, momentum=0.5), 23),
    "epochs": (plan_of(2, 8, lr=0.3), 11),
    "epochs of one batch": (plan_of(5, 50, lr=0.3, momentum=0.0), 7),
}


@pytest.mark.parametrize("pull", [0.0, 30.0])
@pytest.mark.parametrize("name", PLANS)
def test_reach_is_how_far_the_solver_goes(name: str, pull: float) -> None:
    """One weight with a loss that has slopes and next to no curvature: equal slopes for W, slopes
    of their own for R.
    """
    (plan, n), count, flat = PLANS[name], 4000, 1e4
    slopes = [torch.ones(count, n, dtype=torch.float64), normal(count, n)]
    ones, moved = np.ones((n, 1)), []
    for of in slopes:
        clients = Clients.from_arrays([(ones, flat**2 * one.numpy()) for one in of])
        network = Network(linear(1))
        start = initial(network, count)
        start.theta.zero_()
        prior = Pull(
            torch.full((1, 1), pull / n, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        )
        moved.append(
            train(
                network, GaussianRegression(noise=flat), start, clients, plan, RNG, Penalty(prior)
            )[0].theta.squeeze(1)
        )
    reach = few_steps.reach([n], plan, torch.tensor([pull]), False)
    few, W, square, R = (reach[key].item() for key in few_steps.ANSWERS)
    assert few == 1 and square == pytest.approx(W**2)
    torch.testing.assert_close(
        moved[0], torch.full((count,), W, dtype=torch.float64), rtol=1e-5, atol=0.0
    )
    assert moved[1].var().item() == pytest.approx(R, rel=4 * (2 / count) ** 0.5)
    assert (
        W**2 / n < 0.9999 * R or n <= plan.batch_size
    )  # noisier than their mean, unless a batch is all there is


def test_reach_is_that_of_each_client_and_of_few_steps() -> None:
    plan, precision = plan_of(1, 10, lr=0.3), torch.tensor([0.0, 5.0])
    sizes = [8, 31, 8, 60, 21]
    together = few_steps.reach(sizes, plan, precision, False)
    assert together.keys() == few_steps.ANSWERS.keys()
    for c, n in enumerate(sizes):
        alone = few_steps.reach([n], plan, precision, False)
        for key, value in together.items():
            torch.testing.assert_close(value[c], alone[key][0])
    assert together["reach_count"].flatten().tolist() == [1, 1, 1, 0, 1]
    assert not any(value[3].any() for value in together.values())  # sixty take six steps
    # under batch norm a batch of one joins the one before it
    merged = few_steps.reach([21], plan, precision, True)["reach"]
    torch.testing.assert_close(
        merged, few_steps.reach([20], plan, precision * 20 / 21, False)["reach"]
    )


CELLS = {
    "one step": (plan_of(1, 100, lr=0.02), [100], 0.0),
    "one step, a stiff prior": (plan_of(1, 100, lr=0.02), [100], 5000.0),
    "a short last batch": (plan_of(1, 50, lr=0.02), [51], 0.0),
    "sizes": (plan_of(1, 50, lr=0.02), list(range(40, 61)), 0.0),
    "sizes, batches, a stiff prior": (plan_of(1, 25, lr=0.003), list(range(20, 121, 5)), 7000.0),
    "epochs": (plan_of(3, 100, lr=0.01), [100], 500.0),
}


def summary_of(clients: Clients, plan: Plan, m0: Tensor, H: Tensor, pull: float) -> Arrays:
    """Return the sums that the server gets of clients with these Hessians [C, d, d] that train a
    linear network from m0.
    """
    d, count = len(m0), len(clients)
    network, start = Network(linear(d)), initial(Network(linear(d)), count)
    start.theta.copy_(m0.expand(count, -1))
    prior = Pull(pull / clients.sizes.double().unsqueeze(1), m0)
    m = train(network, GaussianRegression(noise=1.0), start, clients, plan, RNG, Penalty(prior))[
        0
    ].theta
    h, square = H.diagonal(dim1=1, dim2=2).mean(1), (H @ H).diagonal(dim1=1, dim2=2).sum(1) / d**2
    reach = few_steps.reach(clients.sizes.tolist(), plan, torch.tensor([pull]), False)
    gaps = m - m0
    return {
        "m": gaps.sum(0),
        "squares": gaps.square().sum(0),
        "count": torch.tensor(float(count)),
        "measured": torch.tensor([float(count)]),
        "time": training_time(clients.sizes, plan).sum(0, keepdim=True),
        "curvature": h.sum(0, keepdim=True),
        "curvature_squares": square.sum(0, keepdim=True),
        **{key: value.double().sum(0) for key, value in reach.items()},
    }


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("truth", [0.0, 0.03, 0.3])
def test_it_finds_the_truth_from_a_few_steps(truth: float, name: str) -> None:
    """Linear regressions with 4 of 40 directions that have curvature, from an m0 off the mean of
    the truths, in two cohorts.

    By their scatter they are all alike. By their gradients' they are as different as they are, and
    where they are not it stays.
    """
    (plan, sizes, pull), count, d, k = CELLS[name], 1200, 40, 4
    sizes = (sizes * count)[:count]
    theta, m0 = truth**0.5 * normal(count, d, seed=3), 0.1 * normal(d, seed=5)
    pairs, H = [], []
    for i, n in enumerate(sizes):
        x = torch.zeros(n, d, dtype=torch.float64)
        x[:, :k] = normal(n, k, seed=10 + i) / 2.0
        pairs.append((x.numpy(), (x @ theta[i] + normal(n, seed=9000 + i)).numpy()))
        H.append(x.mT @ x)
    clients, n0 = Clients.from_arrays(pairs), 50.0
    server = variance.unlearned(torch.ones(1, dtype=torch.float64))
    examples = sum(sizes) / count
    for lr, part in ((plan.lr, range(0, 800)), (0.1 * plan.lr, range(800, count))):
        rows = list(part)
        summary = summary_of(
            clients.select(rows), replace(plan, lr=lr), m0, torch.stack([H[i] for i in rows]), pull
        )
        server |= variance.learn(server, summary, [d], n0, examples, most=1.0)
    evidence = variance.Evidence.of(server)
    sums = few_steps.GradientSums(*server[few_steps.SUMS])
    by_scatter = variance.personal_variance(evidence, [d]).item()
    steep = variance.steepness(evidence, [d])
    told = few_steps.variance(sums, variance.mean_curvature(evidence), steep, examples).item()
    uneven = 4 * steep.item() / examples  # k is too small where sizes differ, and u is
    noise = (
        sums.noise / sums.clients * examples / steep
    ).item()  # what batches differ by, in units of u
    misfit = (
        (k + 1) / 4 * (truth + 0.01)
    )  # examples differ by more than their curvature, as m0 is not where theirs is least
    expected, error = (
        truth / uneven + noise * misfit,
        (truth + noise * (1 + misfit)) * (2 / (count * k)) ** 0.5,
    )
    assert told == pytest.approx(expected, rel=0.1, abs=5 * error)
    assert noise < 0.2 or name == "a short last batch"
    assert uneven < 1.2 or name == "sizes, batches, a stiff prior"
    assert server["V0"].item() / n0 == pytest.approx(variance.best_variance(evidence).item())
    assert server[variance.PERSONAL].item() / n0 == pytest.approx(max(told, by_scatter))
    assert truth == 0.0 or by_scatter < 0.5 * truth or name == "a short last batch"
