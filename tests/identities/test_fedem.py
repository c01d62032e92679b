"""FedEM: one learner is FedAvg, responsibilities are Bayes' rule, and EM finds the components of a
mixture of regressions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    TRAINING,
    batch_normed,
    examples,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
)
from torch import Tensor

import fedhb
from fedhb.algorithms import FedAvg, Problem
from fedhb.algorithms.fedem import FedEM
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import Randomness


@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_one_learner_is_fedavg_bit_for_bit(make, update: str) -> None:
    module, clients = make(), labelled(9, 6, 4, 7, 8)
    one_of_one = fedhb.fit(module, clients, FedEM(num_learners=1, update=update), **TRAINING)
    fedavg = fedhb.fit(module, clients, FedAvg(update=update), **TRAINING)
    server, theirs = one_of_one.state.server, fedavg.state.server
    assert server.keys() == theirs.keys() | {"pi"} and server["pi"].tolist() == [1.0]
    assert all(torch.equal(server[key][0], theirs[key]) for key in theirs)
    x, y = labelled(6, seed=1).train.examples(0)
    assert np.array_equal(one_of_one.predict(x), fedavg.predict(x))
    assert np.array_equal(
        one_of_one.personalise(x, y).predict(x), fedavg.personalise(x, y).predict(x)
    )
    assert [(r["loss"], r["score"]) for r in one_of_one.records] == [
        (r["loss"], r["score"]) for r in fedavg.records
    ]
    # Two learners share the examples between them, and the first is another.
    two = fedhb.fit(module, clients, FedEM(num_learners=2, update=update), **TRAINING)
    assert not torch.equal(two.state.server["theta"][0], theirs["theta"])


NOISE = 0.7


def mixed_regression(
    *shares: tuple[int, ...], w: Tensor, noise: float = 0.0, seed: int = 0
) -> Clients:
    """Clients with shares[i][k] examples of y = w_k . x + noise; |x_1| lies in 1..1.5, so that
    components differ everywhere.
    """
    random, pairs = np.random.default_rng(seed), []
    for counts in shares:
        n = sum(counts)
        x = random.normal(size=(n, w.shape[1]))
        x[:, 0] = random.choice([-1.0, 1.0], n) * random.uniform(1.0, 1.5, n)
        component = random.permutation(np.repeat(np.arange(len(counts)), counts))
        pairs.append((x, (x * w.numpy()[component]).sum(1) + noise * random.normal(size=n)))
    return Clients.from_arrays(pairs)


def gaussians(seed: int = 0) -> tuple[Problem, Clients, Tensor]:
    """Two components that overlap, and clients of different sizes."""
    w = torch.tensor([[0.6, 0.2], [-0.4, 0.5]], dtype=torch.float64)
    clients = mixed_regression((6, 3), (2, 3), (7, 5), w=w, noise=NOISE, seed=seed)
    return problem_of(linear(2), clients, GaussianRegression(noise=NOISE)), clients, w


def densities(clients: Clients, c: int, w: Tensor) -> Tensor:
    """N(y; w_k . x, NOISE^2) [n, M], as printed."""
    x, y = examples(clients, c)
    return torch.exp(-0.5 * ((y.unsqueeze(1) - x @ w.T) / NOISE) ** 2) / (
        NOISE * (2 * torch.pi) ** 0.5
    )


def test_responsibilities_are_bayes_rule() -> None:
    problem, clients, w = gaussians()
    pi = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    q, mean = FedEM(num_learners=2).e_step(problem, {"theta": w}, clients, pi)
    assert q.shape == (2, clients.num_examples)
    for c, own in enumerate(q.T.split(clients.sizes.tolist())):
        joint = pi[c] * densities(clients, c, w)
        exact = joint / joint.sum(1, keepdim=True)
        # A few products and exponentials of numbers near one.
        torch.testing.assert_close(own, exact, rtol=0, atol=1e-14)
        torch.testing.assert_close(mean[c], exact.mean(0), rtol=0, atol=1e-14)
        assert (
            own.min() > 0.001 and own.max() < 0.999
        )  # neither is certain: the test sees the densities


def test_e_steps_alone_find_the_likeliest_weights() -> None:
    problem, clients, w = gaussians(seed=5)
    algorithm = FedEM(num_learners=2, tune=False, pi_steps=3000)
    server = {"theta": w, "pi": torch.full((2,), 0.5, dtype=torch.float64)}
    mine = algorithm.personalise(
        problem, server, clients, algorithm.remember(problem, clients), plan_of(), RNG
    )
    assert torch.equal(mine.theta, w.expand(3, 2, 2))  # no gradient step
    for c in range(3):
        p = densities(clients, c, w)
        # The gradient of mean log sum_k pi_k p_k on the simplex: ratios of one where pi_k > 0, at
        # most one where pi_k = 0. EM converges linearly; 3000 steps leave what rounding leaves,
        # except at a border, which it reaches as 1/steps or faster.
        ratio = (p / (p @ mine.weights[c]).unsqueeze(1)).mean(0)
        assert (mine.weights[c] * (ratio - 1)).abs().max() < 1e-9 and ratio.max() < 1 + 1e-9
    inside = ((mine.weights > 0.01) & (mine.weights < 0.99)).all(1)
    assert (
        inside.any() and (mine.weights[inside][:, 0] - 0.5).abs().min() > 0.01
    )  # not where it began


def test_far_learners_and_dead_weights_give_no_nan() -> None:
    problem, clients, w = gaussians()
    far = torch.stack(
        [w[0], w[0] + 1e4]
    )  # log-likelihoods differ by 1e8 and more: exponentials of them are zero
    q, pi = FedEM(num_learners=2).e_step(
        problem, {"theta": far}, clients, torch.full((3, 2), 0.5, dtype=torch.float64)
    )
    assert torch.equal(pi, torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)) and torch.equal(
        q[0], torch.ones_like(q[0])
    )
    again, _ = FedEM(num_learners=2).e_step(problem, {"theta": w}, clients, pi)
    assert torch.equal(again, q)  # EM never revives a weight of zero


def test_em_recovers_a_mixture_of_linear_regressions() -> None:
    """Without noise, components that differ by 3 |x_1| >= 3 at deviation 0.3: the wrong one has a
    share of exp(-50) or less, so the fixed point is the true w, and pi_i the true shares, to
    rounding.
    """
    w = torch.tensor([[1.5, 1.0], [-1.5, 1.0]], dtype=torch.float64)
    counts = ((9, 1), (4, 4), (0, 6))
    clients = mixed_regression(*counts, w=w)
    problem = problem_of(linear(2), clients, GaussianRegression(noise=0.3))
    algorithm, plan = (
        FedEM(num_learners=2),
        plan_of(batch_size=10, lr=0.05, momentum=0.0),
    )  # one full step a round
    server = algorithm.start(problem, RNG) | {
        "theta": torch.tensor([[0.1, 0.0], [0.0, 0.0]], dtype=torch.float64)
    }
    memory = algorithm.remember(problem, clients)
    first = None
    for number in range(1, 151):
        rng = Randomness(0, number)
        received = algorithm.broadcast(server, [0, 1, 2])
        found, memory = algorithm.local_update(problem, received, clients, memory, plan, rng)
        first = found["pi"] if first is None else first
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
    # The slowest direction's curvature is above 3 (half of the examples, x_2 ~ 1, over 0.3^2):
    # 0.85^150 = 3e-11 of the way is left. The data are stored in float32, so that y = w . x holds
    # to 1e-7.
    torch.testing.assert_close(server["theta"], w, rtol=0, atol=1e-6)
    shares = torch.tensor(counts, dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    torch.testing.assert_close(memory["pi"], shares, rtol=0, atol=1e-12)  # sums of exp(-50) or less
    assert (
        first is not None and (first - shares).abs().max() > 0.05
    )  # which the first round does not know
    torch.testing.assert_close(
        server["pi"], torch.tensor([13, 11], dtype=torch.float64) / 24, rtol=0, atol=1e-12
    )

    # Prediction with a client's own weights: mean and variance of the mixture.
    x = normal(5, 2, seed=3)
    prediction = algorithm.predict(
        problem, server, x, RNG, {key: value[:1] for key, value in memory.items()}
    )
    means = x @ server["theta"].T
    mean = means @ shares[0]
    variance = 0.09 + (means.square() @ shares[0] - mean.square())
    torch.testing.assert_close(prediction[:, 0, 0], mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(prediction[:, 1, 0], variance, rtol=0, atol=1e-12)

    # A new client that is all of the first component finds so by E-steps alone.
    novel = mixed_regression((7, 0), w=w, seed=9)
    weights = dataclasses.replace(algorithm, tune=False)
    mine = weights.personalise(problem, server, novel, weights.remember(problem, novel), plan, RNG)
    torch.testing.assert_close(
        mine.weights, torch.tensor([[1.0, 0.0]], dtype=torch.float64), rtol=0, atol=1e-12
    )
