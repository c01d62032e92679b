"""The gradients of clients' losses, and what is written to their places."""

from __future__ import annotations

import builders
import pytest
import torch
from builders import CLASSES, FEATURES
from torch.nn import functional

from fedhb.network.vectors import Network, Weights

COUNTS = [4, 2, 3]
"""The examples of each client; the rest of the batch is padding."""

X = torch.randn(3, 4, FEATURES, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 0], [1, 1, 2, 0]])


def slope(outputs: torch.Tensor, client: int | None) -> torch.Tensor:
    """Return the derivative of each client's mean cross-entropy in its outputs."""
    clients = range(3) if client is None else [client]
    derivative = torch.zeros_like(outputs)
    for row, c in enumerate(clients):
        n = COUNTS[c]
        onehot = functional.one_hot(Y[c, :n], CLASSES)
        derivative[row, :n] = (outputs[row, :n].softmax(-1) - onehot) / n
    return derivative


def by_autograd(network: Network, weights: Weights, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta, head = (v[c : c + 1].clone().requires_grad_() for v in (weights.theta, weights.head))
    tensors = {slot.name: slot.of(theta[0]) for slot in network.body_slots}
    tensors |= {slot.name: slot.of(head[0]) for slot in network.head_slots}
    buffers = {slot.name: slot.of(weights.buffers[c]).clone() for slot in network.buffer_slots}
    outputs = network.evaluate(tensors | buffers, X[c, : COUNTS[c]])
    loss = functional.cross_entropy(outputs, Y[c, : COUNTS[c]])
    g, g_head = torch.autograd.grad(loss, (theta, head))
    return g[0], g_head[0]


@pytest.mark.parametrize(("keep", "scale"), [(0.0, 1.0), (0.9, 1.0), (1.0, -0.1)])
@pytest.mark.parametrize("make", [builders.mlp, builders.batch_norm_net])
def test_places_take_up_the_gradients(make, keep: float, scale: float) -> None:
    """Of the module that is evaluated for all clients at once, and of the one that is not."""
    network = Network(make())
    weights = builders.perturbed(network, 3)
    expected = [by_autograd(network, weights, c) for c in range(3)]
    places = [torch.randn_like(weights.theta), torch.randn_like(weights.head)]
    before = [place.clone() for place in places]
    bound = network.bind(weights, *places)
    options = {"counts": COUNTS, "seeds": [1, 2, 3], "keep": keep, "scale": scale}
    bound.differentiate(X, slope, **options, training=True)
    for c in range(3):
        for place, old, gradient in zip(places, before, expected[c], strict=True):
            torch.testing.assert_close(
                place[c], keep * old[c] + scale * gradient, rtol=1e-11, atol=1e-13
            )


@pytest.mark.parametrize("make", [builders.mlp, builders.batch_norm_net])
def test_a_head_that_is_not_trained_has_no_place(make) -> None:
    network = Network(make())
    weights = builders.perturbed(network, 3)
    expected = [by_autograd(network, weights, c)[0] for c in range(3)]
    place, head = torch.zeros_like(weights.theta), weights.head.clone()
    network.bind(weights, place, None).differentiate(X, slope, counts=COUNTS, seeds=[0] * 3)
    torch.testing.assert_close(place, torch.stack(expected), rtol=1e-11, atol=1e-13)
    assert torch.equal(weights.head, head)
