"""pFedBayes: the KL and its slopes, the alternating steps, the mean-field posterior, and what is sent, kept and sampled."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from problems import (
    RNG,
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
from torch.distributions import Normal, kl_divergence
from torch.nn import functional
from torch.nn.functional import softplus

import fedhb
from fedhb.algorithms import FedAvg, Problem
from fedhb.algorithms.pfedbayes import Pair, PFedBayes, kl, kl_of_q, kl_of_w, spread
from fedhb.algorithms.toolbox import num_bytes
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER

NOISE = 0.4


def batch_normed() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    )


def dropping() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))
    )


# ---- the KL


def some_values(count: int = 60) -> Tensor:
    """Means around zero, rhos from about -8 to 2: sigma from 3e-4 to 2."""
    values = normal(4, count, seed=3)
    values[1::2] = 2.0 * values[1::2] - 3.0
    return values


def test_the_kl_is_that_of_two_normals() -> None:
    values = some_values()
    q, w = (Normal(mean, softplus(rho)) for mean, rho in (values[:2], values[2:]))
    # A value of up to 1e6 and, near zero, differences of numbers near one.
    torch.testing.assert_close(kl(values), kl_divergence(q, w), rtol=1e-13, atol=1e-13)


def test_the_slopes_are_those_of_autograd() -> None:
    values = some_values().requires_grad_()
    (slope,) = torch.autograd.grad(kl(values).sum(), values)
    mean, rho, prior_mean, prior_rho = values.detach()
    q = kl_of_q(softplus(rho), rho.sigmoid(), softplus(prior_rho))
    w = kl_of_w(prior_mean - mean, softplus(rho), prior_rho.sigmoid(), softplus(prior_rho))
    for row, (ours, curvature) in ((1, q), (3, w)):
        # Where the two terms of a slope in rho cancel, what is left rounds relative to the terms, which are near one.
        torch.testing.assert_close(ours, slope[row], rtol=1e-12, atol=1e-12)
        assert (curvature >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigma_and_its_slope_are_the_same_wherever_a_weight_lies(dtype: torch.dtype) -> None:
    """To the last bit: alone, in any piece, and in a column. torch's own softplus and sigmoid are not."""
    rho = (3.0 * normal(2000, seed=4) - 3.0).to(dtype)
    whole = torch.stack(spread(rho))
    torch.testing.assert_close(
        whole.double(), torch.stack([softplus(rho.double()), rho.double().sigmoid()])
    )
    column = rho.repeat_interleave(3).view(-1, 3)[:, 1]
    assert torch.equal(torch.stack(spread(column)), whole)
    for width in (1, 37, 100):
        assert torch.equal(
            torch.cat([torch.stack(spread(piece)) for piece in rho.split(width)], 1), whole
        )
    assert torch.stack(spread(torch.tensor([200.0], dtype=dtype))).isfinite().all()


# ---- the steps


def linear_gaussian(*sizes: int) -> tuple[Problem, Clients]:
    clients = regression(*sizes)
    return problem_of(linear(3), clients, GaussianRegression(noise=NOISE)), clients


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_update_by_hand(momentum: float) -> None:
    """Three full batches of one client: reparametrised noise, slopes by autograd; proximal steps of the means by their minima."""
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


class Held(Pair):
    """A pair whose w stays where it is."""

    def step(self, active: slice | Tensor, gradient: Tensor) -> None:
        w = self.values[2:].clone()
        super().step(active, gradient)
        self.values[2:], self.velocities[2:] = w, 0.0

    def _pull(self, value: Tensor, velocity: Tensor, target: Tensor, stiffness: Tensor) -> None:
        if value.data_ptr() != self.values[2].data_ptr():
            super()._pull(value, velocity, target, stiffness)


def mean_field(zeta: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For a linear model with known noise and w given, E_q[loss] + zeta KL(q || w) has its minimum at

        (A + zeta P) mu = b + zeta P mu_w,   sigma_k^2 = zeta / (A_kk + zeta P_kk)

    with A = X'X / noise^2, b = X'y / noise^2, P = 1 / sigma_w^2. Eight examples.
    """
    x, y = examples(linear_gaussian(8)[1], 0)
    A, b = x.T @ x / NOISE**2, x.T @ y / NOISE**2
    w = torch.stack([normal(3, seed=5), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)])
    P = softplus(w[1]).pow(-2)
    mu, variance = (
        torch.linalg.solve(A + zeta * P.diag(), b + zeta * P * w[0]),
        zeta / (A.diagonal() + zeta * P),
    )
    assert ((mu - w[0]).abs() > variance.sqrt()).any() and (
        (variance - 1 / P).abs() > 0.3 * variance
    ).any()  # not w itself
    return A, b, w, mu, variance


@pytest.mark.parametrize("zeta", [1.0, 0.3])
def test_with_w_fixed_it_finds_the_mean_field_posterior(zeta: float) -> None:
    """With the expected gradients: (A mu - b) / n in theta, and E[gradient noise] = A_kk sigma / n in sigma."""
    A, b, w, mu, variance = mean_field(zeta)
    pair = Held(
        torch.stack([*w, *w]).unsqueeze(1), torch.full((1, 1), zeta / 8).double(), plan_of(lr=0.05)
    )
    for _ in range(1200):
        gradient = (A @ pair.values[0, 0] - b) / 8
        pair.draw(slice(0, 1), [generator(0)])
        pair.noise[0] = A.diagonal() * softplus(pair.values[1, 0]) / 8 / gradient
        pair.step(slice(0, 1), gradient.unsqueeze(0))
    # The slowest direction, rho, keeps 1 - lr zeta / (8 (1 - momentum)) or so a step: 0.981^1200 = 1e-10 of the way is left.
    torch.testing.assert_close(pair.values[0, 0], mu, rtol=0, atol=1e-8)
    torch.testing.assert_close(softplus(pair.values[1, 0]).square(), variance, rtol=1e-7, atol=0)


def test_with_w_fixed_its_own_noise_finds_the_mean_field_posterior() -> None:
    """Many copies of one client, each with noise of its own; at last small steps, so that rho hardly fluctuates."""
    A, b, w, mu, variance = mean_field(zeta=1.0)
    copies = 250
    pair = Held(
        torch.stack([*w, *w]).unsqueeze(1).repeat(1, copies, 1),
        torch.full((copies, 1), 1 / 8).double(),
        plan_of(),
    )
    everyone, generators = slice(0, copies), [generator(c) for c in range(copies)]
    for lr, steps in ((0.01, 200), (0.002, 400)):
        pair.plan = plan_of(lr=lr)
        for _ in range(steps):
            theta = pair.draw(everyone, generators)
            pair.step(everyone, (theta @ A - b) / 8)
    for ours, exact, scale in (
        (pair.values[0], mu, variance.sqrt()),
        (softplus(pair.values[1]).square(), variance, variance),
    ):
        # Five standard errors of the mean over independent copies, and for what steps of this size leave one percent.
        error = ours.std(0) / math.sqrt(copies)
        assert (5 * error < 0.1 * scale).all()
        assert ((ours.mean(0) - exact).abs() < 5 * error + 0.01 * scale).all()


def test_no_zeta_is_too_stiff() -> None:
    """Means held together by lr zeta / (|D_i| sigma^2) of 1e9: an explicit step would overshoot a billion times."""
    problem, clients = linear_gaussian(6, 4)
    algorithm = PFedBayes(zeta=1e6)
    received = algorithm.start(problem, RNG)
    memory = algorithm.remember(problem, clients)
    memory["mu"] += 1.0
    found, memory = algorithm.local_update(
        problem, received, clients, memory, plan_of(epochs=40), RNG
    )
    # They meet in the first step and stay together.
    assert memory["mu"].abs().max() < 1e-6
    assert all(torch.isfinite(value).all() for value in [*found.values(), *memory.values()])


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
        # Where zeta holds q_i and w together they are within 1e-9 or so; a head without a prior leaves its w behind.
        gaps = {key: (pair.values[0] - pair.values[2]).abs().amax(1) for key, pair in pairs.items()}
        assert (gaps["theta"] < 1e-6).all()
        torch.testing.assert_close(
            gaps["head"], moved if update == "body" else torch.zeros(2).double(), rtol=0, atol=1e-6
        )


# ---- a very strong prior makes it FedAvg


@pytest.mark.parametrize("update", ["body", "full"])
def test_with_a_strong_prior_and_no_width_it_is_fedavg(update: str) -> None:
    """q_i and w are one, and go the whole way of SGD: a strong coupling holds them to each other and not in place."""
    clients = labelled(9, 6, 7)
    problem = problem_of(mlp(4, 5, 3), clients)
    strong, fedavg = PFedBayes(zeta=1.0, rho0=-16.0, update=update), FedAvg(update=update)
    plan, server, plain = (
        plan_of(epochs=3, train_head=update == "full"),
        strong.start(problem, RNG),
        fedavg.start(problem, RNG),
    )
    memory = strong.remember(problem, clients)
    for number in (1, 2):  # in the second round clients begin at the new w
        rng = dataclasses.replace(RNG, round=number)
        found, memory = strong.local_update(problem, server, clients, memory, plan, rng)
        theirs, _ = fedavg.local_update(problem, plain, clients, {}, plan, rng)
        # sigma is 1e-7 and lr k 1e12; nine steps let the difference that the draws make grow some ten times
        for key, other in (("mu", "theta"), *((("head", "head"),) if update == "full" else ())):
            torch.testing.assert_close(found[key], theirs[other], rtol=0, atol=1e-5)
            assert memory[key].abs().max() < 1e-5
        server = strong.aggregate(
            problem, server, strong.summarise(problem, server, found, rng), rng
        )
        plain = fedavg.aggregate(problem, plain, fedavg.summarise(problem, plain, theirs, rng), rng)
    assert (server["mu"] - problem.network.theta).abs().max() > 1e-2


# ---- without a prior and without width it is fine-tuning


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), dropping, batch_normed])
def test_without_prior_and_width_the_personal_model_is_trained_as_in_fedavg(
    make, update: str
) -> None:
    clients = labelled(9, 6, 7)
    problem = problem_of(make(), clients)
    narrow, fedavg = PFedBayes(zeta=0.0, rho0=-30.0, update=update), FedAvg(update=update)
    plan, personal = (
        plan_of(epochs=3, train_head=update == "full"),
        plan_of(epochs=3, train_head=True),
    )
    server, plain = narrow.start(problem, RNG), fedavg.start(problem, RNG)
    memory = narrow.remember(problem, clients)
    found, mine = narrow.local_update(problem, server, clients, memory, plan, RNG)
    theirs, _ = fedavg.local_update(problem, plain, clients, {}, plan, RNG)
    # sigma = 1e-13; nine steps, through a batch norm over as few as two examples, let a difference grow some hundred times.
    mine = {key: value + server[key] for key, value in mine.items()}
    torch.testing.assert_close(mine["mu"], theirs["theta"], rtol=0, atol=1e-9)
    assert ("head" in mine) == (update == "full")
    for key in ("loss", "score", *(key for key in ("buffers",) if key in theirs)):
        torch.testing.assert_close(found[key], theirs[key], rtol=0, atol=1e-9)
    if update == "full":
        torch.testing.assert_close(mine["head"], theirs["head"], rtol=0, atol=1e-9)
    for key in ("mu", "rho", *(("head", "head_rho") if update == "full" else ())):
        assert torch.equal(found[key], server[key].expand(3, -1))  # nothing moves w
    ours = narrow.personalise(problem, server, clients, memory, personal, RNG).arrays()
    for key, value in (
        fedavg.personalise(problem, plain, clients, {}, personal, RNG).arrays().items()
    ):
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9)
    assert ((ours["head"][:, 0] - problem.network.head).abs().amax(1) > 1e-3).all()
    with_width = dataclasses.replace(narrow, rho0=-3.0)
    _, wide = with_width.local_update(
        problem, with_width.start(problem, RNG), clients, memory, plan, RNG
    )
    assert (wide["mu"] + server["mu"] - mine["mu"]).abs().max() > 1e-3  # noise matters


# ---- memory and averages


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
    """A client that comes back while w has moved on: where its own loss is flat, its w stays with the server's."""
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
    assert num_bytes(algorithm.broadcast(server, [0, 1])) == sent and num_bytes(found) == 2 * sent


# ---- prediction


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


# ---- learning


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
    """Ten clients with five shards each: chance is 10 percent, and a client's most frequent class about 30."""
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
