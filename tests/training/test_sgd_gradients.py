"""Local training follows each client's own gradient, as torch computes it."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import RNG, convnet, examples, initial, labelled, mlp, normal, plan_of
from torch import Tensor, nn
from torch.nn import functional

from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train


def sgd_by_torch(module: nn.Module, trained: list[str], seen: list[Batch], plan: Plan) -> Tensor:
    """torch.optim.SGD on the batches that were seen of the only client; the trained parameters as
    one vector.
    """
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
    # sums in another order, and a derivative of the loss that rounds in another way: some roundings
    # a step, nine steps
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
