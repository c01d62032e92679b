"""The clients' step: an exact minimiser for any stiffness, plain SGD without a pull, and each client's own gradient."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    convnet,
    examples,
    initial,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    regression,
)
from torch import Tensor, nn
from torch.nn import functional

from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical, GaussianRegression
from fedhb.network.vectors import Network, Weights
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

MOMENTUM, LR = 0.9, 0.1
MINIMUM, TARGET = 1.0, -0.5  # the loss 1/2 (m - MINIMUM)^2, pulled to TARGET


def minimiser(mu: float) -> float:
    """Of 1/2 (m - MINIMUM)^2 + mu/2 (m - TARGET)^2."""
    return (MINIMUM + mu * TARGET) / (1 + mu)


def proximal(
    mu: float, steps: int = 1000, dtype: torch.dtype = torch.float64, momentum: float = MOMENTUM
) -> float:
    """Where the library's steps lead from zero: one weight, one example (x = 1, y = MINIMUM), noise one.

    After 1000 steps, sqrt(0.9)^1000 = 1e-23 of the way is left.
    """
    clients = Clients.from_arrays([(np.ones((1, 1)), np.full(1, MINIMUM))])
    network = Network(linear(1).to(dtype))
    pull = Pull(torch.full((1, 1), mu, dtype=dtype), torch.full((1,), TARGET, dtype=dtype))
    plan = plan_of(epochs=steps, lr=LR, momentum=momentum)
    start = initial(network, 1)
    start.theta.zero_()
    return train(network, GaussianRegression(noise=1.0), start, clients, plan, RNG, Penalty(pull))[
        0
    ].theta.item()


def by_hand(mu: float, steps: int, *, correct: bool = True, momentum: float = MOMENTUM) -> float:
    """The four lines of proximal.py, or the first three, without the correction of the velocity."""
    m = v = 0.0
    for _ in range(steps):
        v = momentum * v + (m - MINIMUM)
        free = m - LR * v
        m = (free + LR * mu * TARGET) / (1 + LR * mu)
        v += (free - m) / LR if correct else 0.0
    return m


def explicit(mu: float, steps: int) -> float:
    """Plain momentum on the gradient of loss plus penalty."""
    m = v = 0.0
    for _ in range(steps):
        v = MOMENTUM * v + (m - MINIMUM) + mu * (m - TARGET)
        m = m - LR * v
    return m


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 30.0])
def test_momentum_ends_at_the_minimiser_of_loss_plus_penalty(mu: float) -> None:
    # The fixed point is computed with a few roundings of numbers near one.
    assert proximal(mu) == pytest.approx(minimiser(mu), abs=1e-14)


@pytest.mark.parametrize("mu", [0.0, 1.0, 1e5])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_the_step_is_the_documented_one(mu: float, steps: int, momentum: float) -> None:
    assert proximal(mu, steps, momentum=momentum) == pytest.approx(
        by_hand(mu, steps, momentum=momentum), abs=1e-14
    )  # seven steps of numbers near one


def test_without_the_correction_the_penalty_is_too_weak() -> None:
    wrong = by_hand(mu=1.0, steps=1000, correct=False)
    assert wrong == pytest.approx(minimiser(mu=1.0 - MOMENTUM), abs=1e-14)
    assert abs(wrong - minimiser(mu=1.0)) > 0.5  # what the test above would have seen


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_stiff_pull_is_stable(dtype: torch.dtype, rounding: float) -> None:
    # The minimiser is 1.5e-5 from the target: float32 resolves it too.
    assert proximal(mu=1e5, dtype=dtype) == pytest.approx(minimiser(mu=1e5), abs=rounding)
    assert (
        abs(explicit(mu=1e5, steps=20)) > 1e60
    )  # an explicit step is stable below mu = 2 (1 + momentum) / lr = 38


@pytest.mark.parametrize("kind", ["common", "own", "mean"])
@pytest.mark.parametrize("sizes", [(6, 5, 3), (3, 6, 5)])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_training_solves_each_clients_penalised_regression(
    momentum: float, sizes: tuple[int, ...], kind: str
) -> None:
    clients = regression(*sizes, inputs=3)
    mu = (
        torch.tensor([[0.2], [1.0], [5.0]], dtype=torch.float64) * normal(3, seed=1).exp()
    )  # per client and coordinate
    own = normal(3, 3, seed=2)
    aim = own[:1].expand(3, 3) if kind == "common" else own
    follow = 0.3 if kind == "mean" else 0.0  # of m, at the current m
    # the target own[0] + follow m, as a mean of own[0] and the unit vectors with the shares 1 and m_k
    target = own[0] if kind == "common" else own
    shares = None
    if kind == "mean":
        aim, target = (
            own[:1].expand(3, 3),
            torch.cat([own[:1], follow * torch.eye(3, dtype=torch.float64)]),
        )

        def shares(m):
            return torch.cat([torch.ones_like(m[:, :1]), m], dim=1)

    network = Network(linear(3))
    start = Weights(
        torch.zeros(3, 3, dtype=torch.float64), *torch.zeros(2, 3, 0, dtype=torch.float64)
    )
    # full batches; the slowest direction converges as sqrt(0.9)^700 = 1e-16, without momentum more slowly
    plan = plan_of(epochs=700 if momentum else 2000, batch_size=6, momentum=momentum)
    found, _ = train(
        network,
        GaussianRegression(noise=1.0),
        start,
        clients,
        plan,
        RNG,
        penalty=Penalty(Pull(mu, target, shares)),
    )
    for c in range(3):
        x, y = examples(clients, c)
        exact = torch.linalg.solve(
            x.T @ x / len(x) + (1 - follow) * mu[c].diag(), x.T @ y / len(x) + mu[c] * aim[c]
        )
        torch.testing.assert_close(
            found.theta[c], exact, rtol=0, atol=1e-13
        )  # sums of six products, numbers near one


def sgd_by_torch(module: nn.Module, trained: list[str], seen: list[Batch], plan: Plan) -> Tensor:
    """torch.optim.SGD on the batches that were seen of the only client; the trained parameters as one vector."""
    module = copy.deepcopy(module)
    parameters = [p for n, p in module.named_parameters() if n in trained]
    optimiser = torch.optim.SGD(parameters, lr=plan.lr, momentum=plan.momentum)
    for batch in seen:
        optimiser.zero_grad()
        loss = functional.cross_entropy(module(batch.x[0].double()), batch.y[0], reduction="none")
        (loss.sum() / len(loss)).backward()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("make", [convnet, lambda: mlp(16, 5, 3)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_pull_is_sgd(momentum: float, make, train_head: bool) -> None:
    module = make()
    shape = (1, 4, 4) if isinstance(module[0], nn.Conv2d) else (16,)
    clients, plan = (
        labelled(10, shape=shape),
        plan_of(epochs=3, batch_size=4, momentum=momentum, train_head=train_head),
    )
    network = Network(module)

    def trained(**pulls: Pull) -> tuple[Tensor, list[Batch]]:
        seen: list[Batch] = []
        start = initial(network, 1)
        found, _ = train(
            network,
            Categorical(3),
            start,
            clients,
            plan,
            RNG,
            Penalty(**pulls),
            beside=lambda batch, m: seen.append(batch),
        )
        return torch.cat([found.theta[0], found.head[0]]), seen

    plain, seen = trained()
    nothing = torch.zeros(1, 1, dtype=torch.float64)
    idle, _ = trained(
        pull=Pull(nothing, network.theta - 1.0), head_pull=Pull(nothing, network.head + 1.0)
    )
    assert torch.equal(idle, plain)
    names = [
        n
        for n, _ in module.named_parameters()
        if train_head or not n.startswith(f"{network.head_name}.")
    ]
    expected = sgd_by_torch(module, names, seen, plan)
    untouched = network.head[: len(plain) - len(expected)]
    # sums in another order, and a derivative of the loss that rounds in another way: some roundings a step, nine steps
    torch.testing.assert_close(plain, torch.cat([expected, untouched]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [convnet, lambda: mlp(16, 5, 3), lambda: mlp(16, 5, 4, 3)])
def test_gradients_are_each_clients_own(make, count: int, train_head: bool) -> None:
    module = make()
    network = Network(module)
    shape = (1, 4, 4) if isinstance(module[0], nn.Conv2d) else (16,)
    clients = labelled(*[4, 2, 3][:count], shape=shape)  # one batch each, padded to the largest
    start = Weights(
        normal(count, network.num_params, seed=2),
        normal(count, len(network.head), seed=3),
        torch.zeros(count, 0),
    )
    before = torch.cat([start.theta, start.head], 1)
    plan = plan_of(
        batch_size=4, lr=1.0, momentum=0.0, train_head=train_head
    )  # the step is the gradient
    found, _ = train(network, Categorical(3), start, clients, plan, RNG)
    gradient = before - torch.cat([found.theta, found.head], 1)
    for c in range(count):
        own = copy.deepcopy(module)
        nn.utils.vector_to_parameters(before[c], own.parameters())  # the head comes last
        x, y = examples(clients, c)
        functional.cross_entropy(own(x), y).backward()
        expected = torch.cat([p.grad.flatten() for p in own.parameters()])
        if not train_head:
            expected[network.num_params :] = 0.0
        # A few products and sums of numbers near one, in perhaps another order.
        torch.testing.assert_close(gradient[c], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("p_do", [1.0, 0.7])
@pytest.mark.parametrize(
    "sizes", [(9, 6, 2), (2, 9, 6)]
)  # the active clients are the first ones, or not
def test_clients_trained_together_are_clients_trained_alone(
    sizes: tuple[int, ...], p_do: float
) -> None:
    clients, plan, network = (
        labelled(*sizes),
        plan_of(epochs=3, batch_size=4, train_head=True),
        Network(mlp(4, 5, 3)),
    )
    mu = torch.tensor([[0.1], [1.0], [3.0]], dtype=torch.float64)

    def trained(positions: list[int]) -> tuple[Weights, dict[str, Tensor]]:
        start, pull = initial(network, len(positions)), Pull(mu[positions], network.theta)
        return train(
            network,
            Categorical(3),
            start,
            clients.select(positions),
            plan,
            RNG,
            Penalty(pull, p_do=p_do),
        )

    together, reports = trained([0, 1, 2])
    for c in range(3):
        alone, report = trained([c])
        # Batched products may sum in another order; a client that is out of batches takes no step.
        torch.testing.assert_close(together.theta[c : c + 1], alone.theta, rtol=0, atol=1e-13)
        torch.testing.assert_close(together.head[c : c + 1], alone.head, rtol=0, atol=1e-13)
        for key, value in report.items():
            torch.testing.assert_close(reports[key][c : c + 1], value, rtol=0, atol=1e-13)
