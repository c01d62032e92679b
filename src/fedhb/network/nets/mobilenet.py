"""MobileNet v1 for 32x32 images, as in the experiments of FedBABU that the paper builds on.

Stem of 32 channels, thirteen depthwise-separable blocks, average pooling over 2x2, linear head. Convolutions have no bias,
every one is followed by batch norm and ReLU. With a 100-way head at width 1: 3,309,476 parameters, 3,206,976 in the body.

On small maps convolutions are written so that a processor computes their gradients fast, which is a tenth to a fifth of a whole
step: depthwise ones on a map smaller than their kernel pad their input beforehand, pointwise ones are matrix products.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, pad

from fedhb.errors import InputError

BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
"""Output channels and stride of each block."""

SMALL = 4
"""Up to this height and width of a map, pointwise convolutions are faster as matrix products."""


def mobilenet(input_shape: Sequence[int], num_outputs: int, width: float = 1.0) -> nn.Sequential:
    """MobileNet with every channel count multiplied by `width`."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise InputError(
            f"mobilenet needs images [channels, height, width] of at least 16x16, not {tuple(input_shape)}: use mlp or convnet"
        )
    inside = int(32 * width)
    if inside < 1:
        raise InputError(f"width={width} leaves no channel of 32: give at least {1 / 32}")
    layers: list[nn.Module] = [
        _normalised(nn.Conv2d(input_shape[0], inside, 3, padding=1, bias=False))
    ]
    size = max(input_shape[1:])
    for channels, stride in BLOCKS:
        outside = int(channels * width)
        over = (Padded if size < 3 else nn.Conv2d)(
            inside, inside, 3, stride, padding=1, groups=inside, bias=False
        )
        size = -(-size // stride)
        across = (Pointwise if size <= SMALL else nn.Conv2d)(inside, outside, 1, bias=False)
        layers.append(
            nn.Sequential(OrderedDict(depthwise=_normalised(over), pointwise=_normalised(across)))
        )
        inside = outside
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(inside, num_outputs),
        )
    )


class Same(nn.Conv2d):
    """A convolution that is computed in another way. It is printed as what it is, by which runs know their network."""

    def _get_name(self) -> str:
        return "Conv2d"


class Padded(Same):
    """A 3x3 convolution without bias that pads its input by one beforehand."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H', W']."""
        return conv2d(pad(x, (1, 1, 1, 1)), self.weight, stride=self.stride, groups=self.groups)


class Pointwise(Same):
    """A 1x1 convolution without bias, as a product of the pixels [B H W, in] with a matrix [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H, W], channels innermost in memory."""
        return linear(x.movedim(1, -1), self.weight.flatten(1)).movedim(-1, 1)


def _normalised(conv: nn.Conv2d) -> nn.Sequential:
    # in place: batch norm needs its input again, not its output
    return nn.Sequential(
        OrderedDict(conv=conv, norm=nn.BatchNorm2d(conv.out_channels), relu=nn.ReLU(inplace=True))
    )
