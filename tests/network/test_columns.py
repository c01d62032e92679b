"""The columns of a network's weights: where they lie, and how often each is kept."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from columns_of import members
from problems import RNG, initial, labelled, mlp, normal, plan_of, seeded
from torch import Tensor, nn

from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.training.batches import Batch
from fedhb.training.proximal import Penalty
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

    Without momentum and with steps so small that the network stays what it is, only dropped
    coordinates have no gradient.
    """
    clients, points = labelled(16), [network.theta]

    def keep(batch: Batch, m: Tensor) -> None:
        points.append(m[0].clone())

    plan = plan_of(epochs=epochs, batch_size=4, lr=1e-9, momentum=0.0)
    start, penalty = initial(network, 1), Penalty(p_do=p_do)
    train(network, Categorical(3), start, clients, plan, RNG, penalty, keep)
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
    # Means of coin tosses, and of products of two of them: columns and steps are independent.
    # Within five standard errors (and one joint event, where less than one is expected).
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


def test_columns_are_the_weights_that_leave_one_input_unit():
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 3, 2),
            depthwise=nn.Conv2d(3, 3, 2, groups=3),
            transposed=nn.ConvTranspose2d(3, 2, 2),
            flat=nn.Flatten(),
            hidden=nn.Linear(32, 4),
            head=nn.Linear(4, 3),
        )
    )
    network = Network(module)
    columns = network.columns
    places = torch.arange(network.num_params).unsqueeze(0)
    groups = [
        column.flatten() for column in columns.of(places, [(0, g) for g in range(len(columns))])
    ]
    assert len(groups) == 2 + 3 + 3 + 32  # none for biases, none in the head
    members = torch.cat(groups).tolist()
    assert len(set(members)) == len(members)
    marked = {slot.name: slot for slot in network.body_slots}

    def holds(group, name, index):
        vector = torch.zeros(network.num_params)
        vector[group] = 1.0
        expected = torch.zeros(marked[name].shape)
        expected[index] = 1.0
        return torch.equal(marked[name].of(vector), expected) and vector.sum() == expected.sum()

    assert all(holds(groups[i], "conv.weight", (slice(None), i)) for i in range(2))
    assert all(holds(groups[2 + i], "depthwise.weight", (i,)) for i in range(3))
    assert all(holds(groups[5 + i], "transposed.weight", (i,)) for i in range(3))
    assert all(holds(groups[8 + i], "hidden.weight", (slice(None), i)) for i in range(32))


def test_columns_are_kept_with_the_given_probability():
    columns = Network(nn.Sequential(nn.Linear(400, 2), nn.Linear(2, 2))).columns
    drops = columns.drops(0.9, torch.Generator().manual_seed(0))
    dropped = [len(next(drops)) / 400 for _ in range(200)]
    # 80,000 draws: the standard error of the mean is 0.001
    assert abs(sum(dropped) / 200 - 0.1) < 0.005
    assert next(columns.drops(0.0, torch.Generator())) == list(range(400))


def test_columns_lie_where_they_say():
    columns = Network(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))).columns
    vectors = torch.arange(32).view(4, 8)[
        1:
    ]  # weight [2, 3] and bias [2] of the body; rows of a larger matrix
    assert [column.tolist() for column in columns.of(vectors, [(0, 1), (2, 0)])] == [
        [9, 12],
        [24, 27],
    ]
    assert columns.of(vectors, []) == []
