"""pFedBayes: the alternating steps, and what is sent, kept and sampled."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    examples,
    generator,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    regression,
    seeded,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import softplus

import fedhb
from fedhb.algorithms import Problem
from fedhb.algorithms.pfedbayes import Pair, PFedBayes, kl, kl_of_q, kl_of_w
from fedhb.algorithms.toolbox import answer_bytes, num_bytes
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER

NOISE = 0.4


def linear_gaussian(*sizes: int) -> tuple[Problem, Clients]:
    clients = regression(*sizes)
    return problem_of(linear(3), clients, GaussianRegression(noise=NOISE)), clients


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_update_by_hand(momentum: float) -> None:
    """Three full batches of one client: reparametrised noise, slopes by autograd; proximal steps of
    the means by their minima.
    """
    problem, clients = linear_gaussian(6)
    algorithm, lr, n = PFedBayes(zeta=0.7, rho0=-1.0), 0.05, 6
    received, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    plan = plan_of(epochs=3, batch_size=n, lr=lr, momentum=momentum)
    found, remembered = algorithm.local_update(problem, received, clients, memory, plan, RNG)

    x, y = examples(clients, 0)
    values = torch.stack([received["mu"], received["rho"]] * 2)
    velocity, source = torch.zeros_like(values), RNG(0, "weights")
    for _ in range(3):
        noise = torch.randn(3, generator=source).double()
        leaf = values.clone().requires_grad_()
        theta = leaf[0] + softplus(leaf[1]) * noise
        (loss,) = torch.autograd.grad(0.5 * ((y - x @ theta) / NOISE).square().mean(), leaf)
        k = algorithm.zeta / n / softplus(values[3]).square()

        def rho_step(row: int, loss: Tensor | float, curvature: Tensor) -> None:
            leaf = values.clone().requires_grad_()
            (slope,) = torch.autograd.grad(algorithm.zeta / n * kl(leaf).sum(), leaf)
            velocity[row] = (momentum * velocity[row] + slope[row] + loss) / (
                1 + lr * algorithm.zeta / n * curvature
            )
            values[row] -= lr * velocity[row]

        rho_step(
            1, loss[1], kl_of_q(softplus(values[1]), values[1].sigmoid(), softplus(values[3]))[1]
        )
        old = values[[0, 2]].clone()
        q, w = (
            old[0] - lr * (momentum * velocity[0] + loss[0]),
            old[1] - lr * momentum * velocity[2],
        )
        values[2] = (w / lr + k * q) / (
            1 / lr + k
        )  # the minimum of |x - w|^2 / 2 lr + k |x - q|^2 / 2
        values[0] = (q / lr + k * values[2]) / (1 / lr + k)
        velocity[[0, 2]] = (old - values[[0, 2]]) / lr
        rho_step(
            3,
            0.0,
            kl_of_w(
                values[2] - values[0], softplus(values[1]), values[3].sigmoid(), softplus(values[3])
            )[1],
        )
    ours = torch.stack(
        [
            *(remembered[key][0] + found[key][0] for key in ("mu", "rho")),
            found["mu"][0],
            found["rho"][0],
        ]
    )
    # Sums of six squares in another order; slopes of a few units.
    torch.testing.assert_close(ours, values, rtol=0, atol=1e-13)
    assert (values[2:] - torch.stack([received["mu"], received["rho"]])).abs().amax(
        1
    ).min() > 1e-4  # w moves, both parts
    assert found["kl"].item() == pytest.approx(kl(values).sum().item(), rel=1e-12)


def test_the_strength_is_each_clients_own() -> None:
    """zeta / |D_i|: the federation's size does not count."""
    problem, clients = linear_gaussian(3, 9)
    larger = problem_of(linear(3), clients, GaussianRegression(noise=NOISE), num_examples=1000)
    algorithm, plan = PFedBayes(zeta=0.7, rho0=-1.0), plan_of(epochs=2, batch_size=3)
    received, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    found, other = (
        algorithm.local_update(one, received, clients, memory, plan, RNG)[0]
        for one in (problem, larger)
    )
    assert torch.equal(found["mu"], other["mu"])


def test_a_head_that_was_not_sent_is_pulled_nowhere() -> None:
    clients = labelled(9, 6)
    problem = problem_of(mlp(4, 5, 3), clients)
    for update in ("body", "full"):
        algorithm = PFedBayes(zeta=1e6, update=update)
        memory, received = algorithm.remember(problem, clients), algorithm.start(problem, RNG)
        pairs, _, _ = algorithm.fit(
            problem, received, clients, memory, plan_of(epochs=3, train_head=True), RNG
        )
        moved = (pairs["head"].values[0] - problem.network.head).abs().amax(1)
        assert (moved > 1e-2).all()
        # Where zeta holds q_i and w together they are within 1e-9 or so; a head without a prior
        # leaves its w behind.
        gaps = {key: (pair.values[0] - pair.values[2]).abs().amax(1) for key, pair in pairs.items()}
        assert (gaps["theta"] < 1e-6).all()
        torch.testing.assert_close(
            gaps["head"], moved if update == "body" else torch.zeros(2).double(), rtol=0, atol=1e-6
        )


def test_clients_begin_at_the_received_posterior_moved_by_what_is_their_own() -> None:
    clients = labelled(9, 6)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = PFedBayes(update="full")
    server = {
        key: value + 0.1 * normal(len(value), seed=k)
        for k, (key, value) in enumerate(algorithm.start(problem, RNG).items())
    }
    memory = algorithm.remember(problem, clients)
    assert all((value == 0).all() for value in memory.values())  # the second client never took part
    for k, (mean, rho) in enumerate((("mu", "rho"), ("head", "head_rho"))):
        memory[mean][0] += normal(memory[mean].shape[1], seed=10 + k)
        memory[rho][0] += normal(memory[rho].shape[1], seed=20 + k)
    pairs = {
        key: algorithm.pair(problem, server, clients, memory, plan_of(), key).values
        for key in ("theta", "head")
    }  # [4, C, k]
    for values, names in ((pairs["theta"], ("mu", "rho")), (pairs["head"], ("head", "head_rho"))):
        for j, name in enumerate(names):
            assert torch.equal(values[2 + j], server[name].expand(2, -1))
            assert torch.equal(values[j, 0], server[name] + memory[name][0]) and torch.equal(
                values[j, 1], server[name]
            )
    still = plan_of(lr=1e-300, train_head=True)
    found, after = algorithm.local_update(problem, server, clients, memory, still, RNG)
    for key in ("mu", "rho", "head", "head_rho"):
        # what is remembered is added to w and taken from it again
        torch.testing.assert_close(after[key], memory[key], rtol=0, atol=1e-15)
        assert torch.equal(found[key], server[key].expand(2, -1))


def test_what_a_client_remembers_does_not_hold_w_back() -> None:
    """A client that comes back while w has moved on: where its own loss is flat, its w stays with
    the server's.
    """
    clients = labelled(9)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm = PFedBayes(update="body", zeta=10.0)
    server, plan = algorithm.start(problem, RNG), plan_of(epochs=2)
    _, memory = algorithm.local_update(
        problem, server, clients, algorithm.remember(problem, clients), plan, RNG
    )
    moved = server | {"mu": server["mu"] + 5.0}
    found, _ = algorithm.local_update(
        problem, moved, clients, memory, dataclasses.replace(plan, lr=1e-9), RNG
    )
    torch.testing.assert_close(found["mu"][0], moved["mu"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_server_averages_by_size_and_2d_are_sent(update: str) -> None:
    clients = labelled(9, 3)
    problem = problem_of(batch_normed(), clients)
    algorithm = PFedBayes(update=update)
    server = algorithm.start(problem, RNG)
    found, _ = algorithm.local_update(
        problem,
        server,
        clients,
        algorithm.remember(problem, clients),
        plan_of(train_head=update == "full"),
        RNG,
    )
    new = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, server, found, RNG), RNG
    )
    keys = {"mu", "rho", "buffers"} | ({"head", "head_rho"} if update == "full" else set())
    assert new.keys() == server.keys() == keys
    for key in keys:
        mean = 0.75 * found[key][0] + 0.25 * found[key][1]
        torch.testing.assert_close(
            new[key], mean, rtol=0, atol=1e-14
        )  # means of two numbers of a few units
        assert not torch.equal(new[key], server[key])
    d, h, buffers = (
        len(v) for v in (problem.network.theta, problem.network.head, problem.network.buffers)
    )
    sent = 8 * (2 * d + (2 * h if update == "full" else 0) + buffers)
    assert (
        num_bytes(algorithm.broadcast(server, [0, 1])) == sent
        and answer_bytes(algorithm, found) == 2 * sent
    )


def test_draws_have_the_width_of_the_posterior() -> None:
    """Real N(0, 1) noise, for training, personal and global prediction alike."""
    clients = labelled(9)
    problem = problem_of(mlp(4, 5, 3), clients)
    algorithm, count = PFedBayes(num_samples=4000, rho0=-2.0, zeta=0.0), 4000
    server, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    still = plan_of(lr=1e-300, train_head=True)
    mine = algorithm.personalise(problem, server, clients, memory, still, RNG)
    sigma = softplus(torch.tensor(-2.0)).item()
    draws = algorithm.sample(server["mu"], server["rho"], generator(0))
    pair = Pair(
        torch.tensor([0.0, -2.0, 0.0, -2.0]).double().view(4, 1, 1).repeat(1, 1, count),
        torch.ones(1, 1).double(),
        still,
    )
    for drawn, mean in (
        (mine.theta[0], problem.network.theta),
        (mine.head[0], problem.network.head),
        (draws, server["mu"]),
        (pair.draw(slice(0, 1), [generator(1)]).T, torch.zeros(1).double()),
    ):
        # Five standard errors of a mean and of a standard deviation.
        assert ((drawn.mean(0) - mean).abs() < 5 * sigma / math.sqrt(count)).all()
        assert ((drawn.std(0) / sigma - 1).abs() < 5 / math.sqrt(2 * count)).all()
    one = dataclasses.replace(algorithm, num_samples=1).personalise(
        problem, server, clients, memory, still, RNG
    )
    theta, head = one.theta[0, 0] - problem.network.theta, one.head[0, 0] - problem.network.head
    assert (theta[: len(head)] - head).abs().min() > 1e-6  # not the same noise twice


def test_prediction_averages_the_probabilities_of_sampled_networks() -> None:
    module, clients, x = mlp(4, 5, 3), labelled(9, 6), normal(6, 4, seed=2)
    problem = problem_of(module, clients)
    algorithm = PFedBayes(num_samples=3, rho0=-1.0, update="full")
    server = algorithm.start(problem, RNG)
    source = RNG(SERVER, "predict")
    theta, head = (
        algorithm.sample(server[mean], server[rho], source)
        for mean, rho in (("mu", "rho"), ("head", "head_rho"))
    )

    def by_hand(theta: Tensor, head: Tensor) -> Tensor:
        net = copy.deepcopy(module)
        nn.utils.vector_to_parameters(torch.cat([theta, head]), net.parameters())
        return net(x).softmax(-1).detach()

    expected = torch.stack([by_hand(theta[s], head[s]) for s in range(3)]).mean(0)
    # Batched products and a mean of three, rounded in another order.
    torch.testing.assert_close(
        algorithm.predict(problem, server, x, RNG), expected, rtol=0, atol=1e-14
    )
    assert (expected - by_hand(server["mu"], server["head"])).abs().max() > 0.01
    at_the_mean = dataclasses.replace(algorithm, num_samples=0).predict(problem, server, x, RNG)
    torch.testing.assert_close(at_the_mean, module(x).softmax(-1).detach(), rtol=0, atol=1e-14)
    memory = algorithm.remember(problem, clients)
    mine = algorithm.personalise(problem, server, clients, memory, plan_of(train_head=True), RNG)
    assert mine.theta.shape[:2] == mine.head.shape[:2] == mine.weights.shape == (2, 3)
    one = Weights(mine.theta[1], mine.head[1], mine.buffers[1])
    outputs = problem.network.outputs(one, x.expand(3, *x.shape))
    torch.testing.assert_close(
        mine.predict(x.expand(2, 6, 4))[1], outputs.softmax(-1).mean(0), rtol=0, atol=1e-14
    )


def test_it_learns_regressions() -> None:
    clients = regression(20, 12, 16, noise=0.1)
    problem = problem_of(mlp(3, 8, 1), clients, GaussianRegression(noise=0.5))
    algorithm, plan = (
        PFedBayes(zeta=0.001, rho0=-4.0, update="full"),
        plan_of(epochs=4, lr=0.02, train_head=True),
    )
    server, memory, losses = algorithm.start(problem, RNG), algorithm.remember(problem, clients), []
    for number in range(15):
        rng = dataclasses.replace(RNG, round=number)
        found, memory = algorithm.local_update(problem, server, clients, memory, plan, rng)
        summary = algorithm.summarise(problem, server, found, rng)
        losses.append(summary["loss"].item() / 48)
        server = algorithm.aggregate(problem, server, summary, rng)
    constant = 0.5 * math.log(2 * math.pi) + math.log(0.5)  # the loss of a perfect mean
    assert losses[-1] - constant < 0.25 * (losses[0] - constant)
    prediction = algorithm.predict(problem, server, normal(5, 3), RNG)
    assert prediction.shape == (5, 2, 1) and torch.isfinite(prediction).all()


def test_it_learns_digits() -> None:
    """Ten clients with five shards each: chance is 10 percent, and a client's most frequent class
    about 30.
    """
    clients = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=5, seed=0
    )
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options = {
        "rounds": 8,
        "fraction": 0.5,
        "local_epochs": 5,
        "batch_size": 20,
        "personal_lr": 0.01,
        "schedule": "constant",
    }
    run = fedhb.fit(module, clients, PFedBayes(), progress=False, **options)
    assert run.result["global"]["accuracy"] > 0.6 and run.result["personalised"]["accuracy"] > 0.85
    assert run.records[-1]["kl"] > 0
    assert (
        functional.softplus(run.state.server["rho"]).max() < 0.1
    )  # w stays narrower than the weights' own scale
