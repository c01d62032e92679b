"""The columns of a network's weights: where they lie, and how often each is kept."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from fedhb.network.vectors import Network


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
