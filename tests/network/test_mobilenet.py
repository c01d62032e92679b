"""MobileNet is the paper's, whatever makes it fast."""

from __future__ import annotations

import sys

import pytest
import torch
from builders import initial
from torch import nn
from torch.nn import functional

from fedhb.errors import InputError
from fedhb.network import nets
from fedhb.network.nets.mobilenet import BLOCKS
from fedhb.network.vectors import Network


def test_mobilenet_has_the_papers_parameters():
    with torch.device("meta"):
        whole, quarter = (
            nets.mobilenet((3, 32, 32), 100),
            nets.mobilenet((3, 32, 32), 100, width=0.25),
        )

    def split(module):
        body = sum(
            p.numel() for name, p in module.named_parameters() if not name.startswith("head.")
        )
        return body, sum(p.numel() for p in module.parameters())

    assert split(whole) == (3_206_976, 3_309_476)
    assert split(quarter)[0] == 213_072
    network = Network(nets.mobilenet((3, 32, 32), 100, width=0.25), batch_norm="batch")
    assert (
        network.num_params == 213_072
        and len(network.head) == 256 * 100 + 100
        and len(network.buffers) == 0
    )
    assert network.outputs(initial(network), torch.rand(1, 2, 3, 32, 32)).shape == (1, 2, 100)
    last = [m for m in whole.features.modules() if isinstance(m, nn.Conv2d)][-1]
    assert (last.in_channels, last.out_channels, last.bias) == (1024, 1024, None)


def plain_mobilenet(x, weights, strides, eps=1e-5):
    """MobileNet as its paper defines it, in its training mode: padded convolutions, batch norm,
    ReLU, pooling, a linear layer.
    """

    def normalised(x, scale, shift):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        return torch.relu(
            (x - mean) / (var + eps).sqrt() * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
        )

    weights = iter(weights)
    x = normalised(functional.conv2d(x, next(weights), padding=1), next(weights), next(weights))
    for stride in strides:
        x = normalised(
            functional.conv2d(x, next(weights), stride=stride, padding=1, groups=x.shape[1]),
            next(weights),
            next(weights),
        )
        x = normalised(functional.conv2d(x, next(weights)), next(weights), next(weights))
    return functional.linear(x.mean((2, 3)), next(weights), next(weights))


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 16, 16), (1, 20, 36)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mobilenet_is_its_definition_whatever_makes_it_fast(shape, layout):
    torch.manual_seed(0)
    module = nets.mobilenet(shape, 7, width=0.25).double()
    x = torch.randn(5, *shape, dtype=torch.double).contiguous(memory_format=layout)
    found, wanted = (
        module(x),
        plain_mobilenet(x, module.parameters(), [stride for _, stride in BLOCKS]),
    )
    torch.testing.assert_close(found, wanted)
    slopes = [
        torch.autograd.grad(out.square().sum(), list(module.parameters()))
        for out in (found, wanted)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)


def test_mobilenets_weights_have_the_names_they_always_had():
    names = list(dict(nets.mobilenet((3, 32, 32), 100, width=0.25).named_parameters()))
    one = [
        f"{kind}.{part}"
        for kind in ("depthwise", "pointwise")
        for part in ("conv.weight", "norm.weight", "norm.bias")
    ]
    blocks = [f"features.{k}.{part}" for k in range(1, 14) for part in one]
    stem = [f"features.0.{part}" for part in ("conv.weight", "norm.weight", "norm.bias")]
    assert names == [*stem, *blocks, "head.weight", "head.bias"]


def test_a_run_that_was_begun_with_plain_convolutions_goes_on(monkeypatch):
    fast = str(nets.mobilenet((3, 32, 32), 100, width=0.25))
    for kind in ("Padded", "Pointwise"):
        monkeypatch.setattr(sys.modules[nets.mobilenet.__module__], kind, nn.Conv2d)
    assert str(nets.mobilenet((3, 32, 32), 100, width=0.25)) == fast


@pytest.mark.parametrize("shape", [(784,), (3, 8, 8)])
def test_mobilenet_needs_images(shape):
    with pytest.raises(InputError, match="16x16"):
        nets.mobilenet(shape, 10)
