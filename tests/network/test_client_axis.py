"""C clients at once get what each would get from torch alone."""

from __future__ import annotations

import pytest
import torch
from builders import Wrapped, batch_norm_net, mlp, perturbed, seeded
from gradients import EXACT, cross_entropy, gradients, labels, normal
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedhb.network.vectors import Network

ACTIVATIONS = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
)


def frozen_middle():
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    layers[2].requires_grad_(False)
    return layers


def frozen_first_weight():
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    layers[0].weight.requires_grad_(False)
    return layers


def one_activation_twice():
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 5), act, nn.Linear(5, 3), act)


STACKED = {
    "two layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "one layer": lambda: nn.Sequential(nn.Linear(4, 3)),
    "no bias": lambda: nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)
    ),
    "flatten": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.GELU())), nn.Linear(5, 3)
    ),
    "every activation": lambda: nn.Sequential(
        nn.Linear(4, 4), *(layer for a in ACTIVATIONS for layer in (a(), nn.Linear(4, 4)))
    ),
    "no parameters": lambda: nn.Sequential(nn.Identity(), nn.Linear(4, 3), nn.Identity()),
    "frozen layer": frozen_middle,
    "frozen weight": frozen_first_weight,
    "one activation twice": one_activation_twice,
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("train_head", [True, False])
def test_stacked_equals_client_by_client(name, train_head):
    with seeded():
        layers = STACKED[name]().double()
    stacked, generic = Network(layers), Network(Wrapped(layers))
    assert stacked.batches_clients and not generic.batches_clients
    assert torch.equal(stacked.theta, generic.theta) and torch.equal(stacked.head, generic.head)
    weights = perturbed(stacked, 3)
    x, y = normal(3, 6, *((2, 2) if name == "flatten" else (4,))), labels(3, 6, classes=3)
    torch.testing.assert_close(stacked.outputs(weights, x), generic.outputs(weights, x), **EXACT)
    shared = normal(6, *x.shape[2:], seed=3).expand(3, *x.shape[1:])  # one batch for all clients
    torch.testing.assert_close(
        stacked.outputs(weights, shared), generic.outputs(weights, shared), **EXACT
    )
    ours, theirs = (gradients(network, weights, x, y, train_head) for network in (stacked, generic))
    torch.testing.assert_close(ours[0], theirs[0], **EXACT)
    if train_head:
        torch.testing.assert_close(ours[1], theirs[1], **EXACT)
        assert ours[0].abs().sum(1).min() > 0
    else:
        assert ours[1] is None and theirs[1] is None


@pytest.mark.parametrize("make", [mlp, batch_norm_net])
def test_the_heads_gradient_alone_is_the_same_and_touches_no_body(make):
    """FedPop's chain moves heads under a fixed body: what lies below the head is evaluated, not
    differentiated.
    """
    network = Network(make().double())
    x, y = normal(2, 6, 4), labels(2, 6)
    found, buffers = [], []
    for want_body in (True, False):
        weights = perturbed(network, 2)
        body, head = (
            torch.full_like(weights.theta, torch.nan),
            torch.full_like(weights.head, torch.nan),
        )
        network.bind(weights, body if want_body else None, head).differentiate(
            x, cross_entropy(y), counts=[6, 6], seeds=[0, 1]
        )
        found.append(head)
        buffers.append(weights.buffers)
        assert body.isnan().all() == (not want_body)
    assert torch.equal(*found) and found[0].abs().sum() > 0
    assert torch.equal(*buffers)


def tied():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    layers[2].weight = layers[0].weight
    return layers


def one_layer_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3))


class Doubled(nn.Identity):
    def forward(self, x):
        return 2.0 * x.mean(0, keepdim=True) + x


def hooked():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    layers[0].register_forward_hook(lambda module, inputs, output: output * 2.0)
    return layers


@pytest.mark.parametrize(
    "make",
    [
        tied,
        one_layer_twice,
        lambda: nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 3)),
        hooked,
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)
        ),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Linear(4, 3)),
    ],
)
def test_what_is_more_than_linear_layers_and_activations_is_left_to_torch(make):
    with seeded():
        layers = make().double()
    network = Network(layers)
    assert not network.batches_clients
    weights, x, y = perturbed(network, 2), normal(2, 5, 4), labels(2, 5)
    body, head = gradients(network, weights, x, y)
    for c in range(2):
        tensors = {
            s.name: s.of(weights.theta[c]).clone().requires_grad_() for s in network.body_slots
        }
        tensors |= {
            s.name: s.of(weights.head[c]).clone().requires_grad_() for s in network.head_slots
        }
        outputs = functional_call(layers, tensors, (x[c],))
        torch.testing.assert_close(network.outputs(weights, x)[c], outputs.detach(), **EXACT)
        functional.cross_entropy(outputs, y[c]).backward()
        for slots, found in ((network.body_slots, body), (network.head_slots, head)):
            for slot in slots:
                torch.testing.assert_close(slot.of(found[c]), tensors[slot.name].grad, **EXACT)


def test_generic_evaluation_ignores_padding():
    network = Network(batch_norm_net())
    x, y = normal(2, 6, 4), labels(2, 6)
    other = x.clone()
    other[1, 4:] = 1e6
    results = []
    for inputs in (x, other):
        weights = perturbed(network, 2)
        results.append((*gradients(network, weights, inputs, y, counts=[6, 4]), weights.buffers))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
