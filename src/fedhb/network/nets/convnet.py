"""The small convolutional network for EMNIST: the paper says "two hidden layers" and no more (docs/deviations.md)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedhb.errors import InputError


def convnet(input_shape: Sequence[int], num_outputs: int, hidden: int = 0) -> nn.Sequential:
    """Two 3x3 convolutions (16 and 32 channels, padding 1), each with 2x2 max pooling and ReLU, and a linear head.

    On 28x28 images the body has 4,800 weights and the head of 47 classes 74,000: a method that trains the body has little to
    train. 128 `hidden` units before the head make that 205,632 and 6,000.

    The maximum of rectified values is the rectified maximum: ReLU after the pooling gives the same from a quarter of them.
    """
    if len(input_shape) != 3:
        raise InputError(
            f"a convnet needs images [channels, height, width], not inputs of shape {tuple(input_shape)}: use mlp"
        )
    if hidden < 0:
        raise InputError(f"hidden={hidden}: give the number of hidden units, or 0 for none")
    channels, height, width = input_shape
    features = 32 * (height // 4) * (width // 4)
    between = (
        OrderedDict(hidden=nn.Linear(features, hidden), relu3=nn.ReLU())
        if hidden
        else OrderedDict()
    )
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            **between,
            head=nn.Linear(hidden or features, num_outputs),
        )
    )
