"""Dropout of columns (eq:spiky2): which weights a column holds, how often it is dropped, and what a step does with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from problems import RNG, initial, labelled, mlp, normal, plan_of, seeded
from torch import Tensor, nn
from torch.nn import functional

from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical
from fedhb.network.columns import Columns
from fedhb.network.vectors import Network, Weights
from fedhb.training.batches import Batch
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "convolution": (lambda: nn.Conv2d(4, 3, 3), (4, 5, 5)),
    "convolution in one dimension": (lambda: nn.Conv1d(4, 3, 3), (4, 5)),
    "depthwise convolution": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
    "depthwise convolution with two kernels a channel": (
        lambda: nn.Conv2d(4, 8, 3, groups=4),
        (4, 5, 5),
    ),
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3), (4, 5, 5)),
    "grouped transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 5, 5)),
}


def members(columns: Columns) -> list[Tensor]:
    """The coordinates of every column."""
    last = max(
        (
            start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            for start, size, stride in columns.grids
        ),
        default=0,
    )
    places = torch.arange(last + 1).unsqueeze(0)
    return [
        column.flatten() for column in columns.of(places, [(0, g) for g in range(len(columns))])
    ]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_column_is_what_one_input_unit_feeds(kind: str) -> None:
    build, shape = LAYERS[kind]
    module = seeded(build)
    columns = members(Network(module, head="").columns)
    assert len(columns) == shape[0]
    # Every weight is in one column, no bias in any.
    assert torch.cat(columns).sort().values.tolist() == list(range(module.weight.numel()))
    for j, column in enumerate(columns):
        thinned = copy.deepcopy(module)
        thinned.weight.data.view(-1)[column] = 0.0
        x = normal(2, *shape, seed=1).requires_grad_()
        (gradient,) = torch.autograd.grad((thinned(x) * normal(*thinned(x).shape, seed=2)).sum(), x)
        felt = (
            gradient.abs().flatten(2).amax(2) if gradient.ndim > 2 else gradient.abs()
        )  # [2, inputs]
        assert (felt[:, j] == 0).all()
        assert (felt[:, [k for k in range(shape[0]) if k != j]] > 0).all()


def test_a_column_of_an_embedding_is_one_word() -> None:
    module = seeded(lambda: nn.Embedding(5, 3))
    columns = members(Network(module, head="").columns)
    assert [column.tolist() for column in columns] == [
        [3 * j, 3 * j + 1, 3 * j + 2] for j in range(5)
    ]


def test_biases_normalisation_and_head_are_in_no_column() -> None:
    module = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.BatchNorm2d(3),
            nn.GroupNorm(1, 3),
            nn.LayerNorm((3, 3, 3)),
            nn.Flatten(),
            nn.Linear(27, 4),
            nn.LayerNorm(4),
            nn.PReLU(4),
            nn.Linear(4, 2),
        )
    )
    network = Network(module)
    dropped = torch.zeros(network.num_params)
    dropped[torch.cat(members(network.columns))] = 1.0
    for slot in network.body_slots:
        expected = 1.0 if slot.name in ("0.weight", "5.weight") else 0.0
        assert (dropped[slot.start : slot.stop] == expected).all(), slot.name
    assert len(network.columns) == 2 + 27


def stayed(network: Network, p_do: float, epochs: int = 1) -> Tensor:
    """Which coordinates did not move, in each of `epochs` times four steps, as numbers [steps, d].

    Without momentum and with steps so small that the network stays what it is, only dropped coordinates have no gradient.
    """
    clients, points = labelled(16), [network.theta]

    def keep(batch: Batch, m: Tensor) -> None:
        points.append(m[0].clone())

    plan = plan_of(epochs=epochs, batch_size=4, lr=1e-9, momentum=0.0)
    train(
        network, Categorical(3), initial(network, 1), clients, plan, RNG, Penalty(p_do=p_do), keep
    )
    return torch.stack([old == new for old, new in pairwise(points)]).double()


@pytest.mark.parametrize("p_do", [0.999, 0.7, 0.2])
def test_columns_are_kept_together_with_probability_p_do(p_do: float) -> None:
    network = Network(mlp(4, 5, 3))
    groups = members(network.columns)
    dropped = stayed(network, p_do, epochs=400)
    by_column = torch.stack([dropped[:, group[0]] for group in groups], 1)  # [steps, columns]
    assert all(
        torch.equal(dropped[:, group], by_column[:, [g]].expand(-1, len(group)))
        for g, group in enumerate(groups)
    )
    # Means of coin tosses, and of products of two of them: columns and steps are independent. Within five standard errors
    # (and one joint event, where less than one is expected).
    steps = len(dropped)
    variance, errors = p_do * (1 - p_do), 5 / math.sqrt(steps)
    centred = by_column - (1 - p_do)
    assert (centred.mean(0).abs() < errors * math.sqrt(variance)).all()
    among_columns, with_the_last_step = (
        centred.T @ centred / steps,
        centred[1:].T @ centred[:-1] / steps,
    )
    among_columns.fill_diagonal_(0.0)
    for covariance in (among_columns, with_the_last_step):
        assert covariance.abs().max() < errors * variance + 1 / steps


def test_nothing_and_everything_can_be_dropped() -> None:
    network = Network(mlp(4, 5, 3))
    assert stayed(network, 1.0).sum() == 0
    weights, biases = stayed(network, 0.0).split([20, 5], dim=1)
    assert weights.all() and not biases.any()


def one_step(network: Network, clients: Clients, p_do: float, pull: Pull | None = None) -> Weights:
    """One step without momentum on all examples."""
    plan = plan_of(batch_size=20, lr=0.1, momentum=0.0, train_head=True)
    return train(
        network,
        Categorical(3),
        initial(network, len(clients)),
        clients,
        plan,
        RNG,
        Penalty(pull, p_do=p_do),
    )[0]


@pytest.mark.parametrize("wrap", [False, True])
def test_a_step_is_that_of_the_thinned_network_and_dropped_weights_stay(wrap: bool) -> None:
    module = mlp(4, 5, 4, 3)
    if wrap:  # evaluated client by client
        module = nn.Sequential(module, nn.Softmax(-1))
    clients, network = labelled(20, 15, 20), Network(module)
    assert network.batches_clients != wrap
    after = one_step(network, clients, p_do=0.5)
    groups, masks = members(network.columns), []
    for c in range(len(clients)):
        moved = after.theta[c] != network.theta
        mask = torch.ones(network.num_params, dtype=torch.float64)
        for group in groups:
            if not moved[group].any():
                mask[group] = 0.0
        masks.append(mask)
        thinned = copy.deepcopy(module)
        names = [n for n, _ in thinned.named_parameters()]
        assert names[-2:] == [f"{network.head_name}.weight", f"{network.head_name}.bias"]
        full = torch.cat([network.theta * mask, network.head])
        nn.utils.vector_to_parameters(full, thinned.parameters())
        x, y = clients.train.examples(c)
        functional.cross_entropy(thinned(x.double()), y).backward()
        gradient = torch.cat([p.grad.flatten() for p in thinned.parameters()])
        expected = torch.cat([network.theta, network.head]) - 0.1 * gradient * torch.cat(
            [mask, torch.ones_like(network.head)]
        )
        # The mean of twenty small gradients, in another order.
        torch.testing.assert_close(
            torch.cat([after.theta[c], after.head[c]]), expected, rtol=0, atol=1e-15
        )
        assert torch.equal(after.theta[c][mask == 0], network.theta[mask == 0])
    dropped = [int((m == 0).sum()) for m in masks]
    assert all(0 < n < len(torch.cat(members(network.columns))) for n in dropped)
    assert not torch.equal(masks[0], masks[1])  # each client has a mask of its own


def test_the_pull_reaches_dropped_weights() -> None:
    clients, network = labelled(20, 15), Network(mlp(4, 5, 3))
    mu, target = torch.full((1, 1), 0.7, dtype=torch.float64), torch.zeros_like(network.theta)
    free, pulled = (
        one_step(network, clients, p_do=0.5, pull=pull) for pull in (None, Pull(mu, target))
    )
    # The same masks; then the proximal step to zero on every coordinate. Some roundings.
    torch.testing.assert_close(pulled.theta, free.theta / (1 + 0.1 * 0.7), rtol=1e-14, atol=0)
