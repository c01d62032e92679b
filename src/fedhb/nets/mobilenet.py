"""MobileNet v1 for 32x32 images, as in the experiments of FedBABU that the paper builds on.

Stem of 32 channels, thirteen depthwise-separable blocks, average pooling over 2x2, linear head. Convolutions have no bias,
every one is followed by batch norm and ReLU. With a 100-way head at width 1: 3,309,476 parameters, 3,206,976 in the body.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedhb.errors import InputError

BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Output channels and stride of each block."""


def mobilenet(input_shape: Sequence[int], num_outputs: int, width: float = 1.0) -> nn.Sequential:
    """MobileNet with every channel count multiplied by `width`."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise InputError(
            f"mobilenet needs images [channels, height, width] of at least 16x16, not {tuple(input_shape)}: use mlp or convnet"
        )
    inside = int(32 * width)
    if inside < 1:
        raise InputError(f"width={width} leaves no channel of 32: give at least {1 / 32}")
    layers: list[nn.Module] = [_convolution(input_shape[0], inside, 3, padding=1)]
    for channels, stride in BLOCKS:
        outside = int(channels * width)
        depthwise = _convolution(inside, inside, 3, stride=stride, padding=1, groups=inside)
        layers.append(nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=_convolution(inside, outside, 1))))
        inside = outside
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(inside, num_outputs),
        )
    )


def _convolution(inside: int, outside: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inside, outside, kernel, stride=stride, padding=padding, groups=groups, bias=False),
            norm=nn.BatchNorm2d(outside),
            relu=nn.ReLU(inplace=True),  # batch norm needs its input again, not its output
        )
    )
