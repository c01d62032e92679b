"""MobileNet v1 for 32x32 images, as in the experiments of FedBABU that the paper builds on.

It has a stem of 32 channels, thirteen depthwise-separable blocks, average pooling over 2x2, and a
linear head. Convolutions have no bias; batch norm and ReLU follow each. With a head of 100 classes
at width 1 it has 3,309,476 parameters, of which 3,206,976 are in the body.

On small maps two kinds of convolutions are computed in another way, because processors compute
their gradients slowly otherwise, which would take a tenth to a fifth of a whole step: depthwise
convolutions on a map smaller than their kernel pad their input beforehand, and pointwise
convolutions are matrix products.
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

MAX_SIZE_OF_PRODUCTS = 4
"""Up to this height and width of a map, pointwise convolutions are faster as matrix products."""


def mobilenet(input_shape: Sequence[int], num_outputs: int, width: float = 1.0) -> nn.Sequential:
    """Make a MobileNet with every number of channels multiplied by `width`."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise InputError(
            "mobilenet needs images [channels, height, width] of at least 16x16, not "
            f"{tuple(input_shape)}: use mlp or convnet"
        )
    in_channels = int(32 * width)
    if in_channels < 1:
        raise InputError(f"width={width} leaves no channel of 32: give at least {1 / 32}")
    stem = nn.Conv2d(input_shape[0], in_channels, 3, padding=1, bias=False)
    layers: list[nn.Module] = [_normalised(stem)]
    size = max(input_shape[1:])
    for channels, stride in BLOCKS:
        out_channels = int(channels * width)
        depthwise = (Padded if size < 3 else nn.Conv2d)(
            in_channels, in_channels, 3, stride, padding=1, groups=in_channels, bias=False
        )
        size = -(-size // stride)
        pointwise = (Pointwise if size <= MAX_SIZE_OF_PRODUCTS else nn.Conv2d)(
            in_channels, out_channels, 1, bias=False
        )
        layers.append(
            nn.Sequential(
                OrderedDict(depthwise=_normalised(depthwise), pointwise=_normalised(pointwise))
            )
        )
        in_channels = out_channels
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(in_channels, num_outputs),
        )
    )


class FastConvolution(nn.Conv2d):
    """A convolution that is computed in another way.

    It is printed as a Conv2d, because runs know their network by how it prints.
    """

    def _get_name(self) -> str:
        return "Conv2d"


class Padded(FastConvolution):
    """A 3x3 convolution without bias that pads its input by one beforehand."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H', W']."""
        return conv2d(pad(x, (1, 1, 1, 1)), self.weight, stride=self.stride, groups=self.groups)


class Pointwise(FastConvolution):
    """A 1x1 convolution without bias: the pixels [B H W, in] times a matrix [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H, W], channels innermost in memory."""
        return linear(x.movedim(1, -1), self.weight.flatten(1)).movedim(-1, 1)


def _normalised(conv: nn.Conv2d) -> nn.Sequential:
    # ReLU works in place: the gradient of batch norm needs its input, not its output.
    return nn.Sequential(
        OrderedDict(conv=conv, norm=nn.BatchNorm2d(conv.out_channels), relu=nn.ReLU(inplace=True))
    )
