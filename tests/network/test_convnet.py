"""The small convolutional network."""

from __future__ import annotations

import pytest
import torch
from builders import initial

from fedhb.errors import InputError
from fedhb.network import nets
from fedhb.network.vectors import Network


def test_convnet():
    network = Network(nets.convnet((1, 28, 28), 62))
    assert network.num_params == (16 * 9 + 16) + (32 * 16 * 9 + 32)
    assert len(network.head) == 62 * (32 * 7 * 7 + 1)
    assert network.outputs(initial(network, 2), torch.rand(2, 3, 1, 28, 28)).shape == (2, 3, 62)
    with pytest.raises(InputError, match=r"\(64,\)"):
        nets.convnet((64,), 10)
    larger = Network(nets.convnet((1, 28, 28), 62, hidden=128))
    assert (
        larger.num_params == network.num_params + 1568 * 128 + 128
        and len(larger.head) == 128 * 62 + 62
    )
    assert larger.outputs(initial(larger, 2), torch.zeros(2, 3, 1, 28, 28)).shape == (2, 3, 62)
    with pytest.raises(InputError, match="hidden=-1"):
        nets.convnet((1, 28, 28), 10, hidden=-1)
