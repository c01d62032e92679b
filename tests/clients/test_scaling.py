"""Inputs are scaled by the mean and deviation of what is trained on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedhb.clients.clients import Clients
from fedhb.clients.scaling import Scaling


def pairs(sizes, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 2)), rng.integers(0, classes, n)) for n in sizes]


@pytest.mark.parametrize(
    ("shape", "axes"), [((200, 3), 0), ((50, 3, 4, 5), (0, 2, 3)), ((40, 3, 7), (0, 1, 2))]
)
def test_scaling_is_per_feature_or_channel(shape, axes):
    rng = np.random.default_rng(0)
    step = np.arange(1, shape[1] + 1).reshape(1, -1, *[1] * (len(shape) - 2))
    x = (rng.normal(size=shape) * step + 10 * step).astype(np.float32)
    scaled = Scaling.fit(x)(torch.from_numpy(x), torch.float64).numpy()
    np.testing.assert_allclose(scaled.mean(axis=axes), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(axis=axes), 1, rtol=1e-5)


def test_scaling_broadcasts_over_a_batch_of_clients():
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), dtype=np.uint8)
    scaling = Scaling.fit(x)
    flat = scaling(torch.from_numpy(x), torch.float32)
    torch.testing.assert_close(
        scaling(torch.from_numpy(x).reshape(2, 3, 3, 4, 4), torch.float32),
        flat.reshape(2, 3, 3, 4, 4),
    )


def test_a_constant_feature_becomes_zero():
    x = np.array([[5.0, 1.0], [5.0, 3.0]], np.float32)
    assert Scaling.fit(x)(torch.from_numpy(x), torch.float32).tolist() == [[0, -1], [0, 1]]


def test_no_scaling_leaves_inputs_as_they_are():
    x = torch.arange(4, dtype=torch.uint8).reshape(2, 2)
    assert Scaling().is_identity and Scaling()(x, torch.float32).tolist() == [[0, 1], [2, 3]]
    assert Clients.from_arrays(pairs([3])).scaling.is_identity
    assert not Clients.from_arrays(pairs([3]), standardise=True).scaling.is_identity
