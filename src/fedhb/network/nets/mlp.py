"""The multi-layer perceptron of the paper's MNIST and Fashion-MNIST experiments: 784-256-10."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedhb.errors import InputError


def mlp(input_shape: Sequence[int], num_outputs: int, hidden: int = 256) -> nn.Sequential:
    """Make a network of one hidden layer of ReLU units and a linear head, for flattened inputs."""
    if hidden < 1:
        raise InputError(f"hidden={hidden}: give the number of hidden units, at least 1")
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(math.prod(input_shape), hidden),
            relu=nn.ReLU(),
            head=nn.Linear(hidden, num_outputs),
        )
    )
