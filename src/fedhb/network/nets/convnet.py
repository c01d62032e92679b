"""The small convolutional network for EMNIST.

The paper says only that it has "two hidden layers" (docs/deviations.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedhb.errors import InputError


def convnet(input_shape: Sequence[int], num_outputs: int, hidden: int = 0) -> nn.Sequential:
    """Make a network of two 3x3 convolutions and a linear head.

    The convolutions have 16 and 32 channels and padding 1; each is followed by 2x2 max pooling and
    ReLU. On 28x28 images the body has 4,800 weights and a head of 47 classes 74,000, so a method
    that trains only the body trains few weights. With `hidden` = 128 units before the head it is
    205,632 and 6,000.

    ReLU comes after the pooling: max(relu(x)) = relu(max(x)), for a quarter of the values.
    """
    if len(input_shape) != 3:
        raise InputError(
            "a convnet needs images [channels, height, width], not inputs of shape "
            f"{tuple(input_shape)}: use mlp"
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
