"""A network beside its weights: scaling, running statistics, randomness, the order of
channels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from builders import batch_norm_net, dropout_net, initial, mlp, perturbed, seeded
from gradients import EXACT, gradients, labels, normal, two_heads
from torch import nn
from torch.nn import functional

from fedhb.clients.scaling import Scaling
from fedhb.errors import InputError
from fedhb.network.vectors import Network, Weights


def test_inputs_are_scaled():
    module, scaling = (
        mlp(),
        Scaling(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 1.0, 2.0, 4.0])),
    )
    network = Network(module, scaling=scaling)
    x = normal(1, 5, 4)
    expected = module((x[0] - scaling.mean) / scaling.std).detach()
    torch.testing.assert_close(network.outputs(initial(network), x)[0], expected, **EXACT)


def test_running_statistics_are_those_of_an_ordinary_training_step():
    module, network = batch_norm_net(), Network(batch_norm_net())
    weights, x, y = initial(network, 2), normal(2, 6, 4), labels(2, 6)
    found, head = gradients(network, weights, x, y)
    for c in range(2):
        reference = copy.deepcopy(module).train()
        functional.cross_entropy(reference(x[c]), y[c]).backward()
        expected = torch.cat([reference.norm.running_mean, reference.norm.running_var])
        torch.testing.assert_close(weights.buffers[c], expected, **EXACT)
        grads = {name: p.grad for name, p in reference.named_parameters()}
        for slots, gradient in ((network.body_slots, found), (network.head_slots, head)):
            for slot in slots:
                torch.testing.assert_close(slot.of(gradient[c]), grads[slot.name], **EXACT)
        torch.testing.assert_close(
            network.outputs(
                Weights(*(v[c : c + 1] for v in (weights.theta, weights.head, weights.buffers))),
                x[c : c + 1],
            )[0],
            reference.eval()(x[c]).detach(),
            **EXACT,
        )
    assert not torch.allclose(weights.buffers[0], weights.buffers[1])
    assert torch.equal(network.buffers, Network(module).buffers)  # the initial ones stay


def test_evaluation_with_running_statistics_does_not_depend_on_the_batch():
    network = Network(batch_norm_net())
    weights, x = perturbed(network, 1), normal(1, 6, 4)
    before = weights.buffers.clone()
    whole = network.outputs(weights, x)
    torch.testing.assert_close(network.outputs(weights, x[:, :2]), whole[:, :2], **EXACT)
    assert torch.equal(weights.buffers, before)
    other = Weights(weights.theta, weights.head, weights.buffers + 1.0)
    assert not torch.allclose(network.outputs(other, x), whole)


def test_batch_statistics_need_no_buffers_and_depend_on_the_batch():
    module, network = batch_norm_net(), Network(batch_norm_net(), batch_norm="batch")
    assert len(network.buffers) == 0 and network.has_batch_norm
    weights, x = initial(network, 1), normal(1, 6, 4)
    whole = network.outputs(weights, x)
    torch.testing.assert_close(whole[0], module.train()(x[0]).detach(), **EXACT)
    assert not torch.allclose(network.outputs(weights, x[:, :3]), whole[:, :3])


def test_integer_buffers_stay_as_they_are():
    network = Network(two_heads())
    assert {s.name for s in network.buffer_slots} == {
        "body.1.running_mean",
        "body.1.running_var",
        "scale",
    }
    weights = initial(network, 2)
    gradients(network, weights, normal(2, 5, 4), labels(2, 5))
    assert network.module.body[1].num_batches_tracked == 0 and network.module.table.tolist() == [
        0,
        1,
        2,
    ]


def test_a_running_mean_over_all_batches_is_refused():
    # its weight is a count, which would go on from one client to the next
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    with pytest.raises(InputError, match="momentum=None"):
        Network(module)
    assert Network(module, batch_norm="batch").has_batch_norm


def test_randomness_inside_the_module_is_the_clients_own():
    network = Network(dropout_net())
    x, y = normal(3, 6, 4), labels(3, 6)
    torch.manual_seed(1)
    first, _ = gradients(network, initial(network, 3), x, y, seeds=[5, 6, 5])
    before = torch.get_rng_state()
    torch.rand(7)
    again, _ = gradients(network, initial(network, 3), x, y, seeds=[5, 6, 5])
    assert torch.equal(first, again)
    torch.set_rng_state(before)
    gradients(network, initial(network, 3), x, y)
    network.outputs(initial(network, 3), x)
    network.gate(2)
    assert torch.equal(torch.get_rng_state(), before)
    alone, _ = gradients(network, initial(network, 1), x[2:], y[2:], seeds=[5])
    assert torch.equal(alone[0], first[2])
    other, _ = gradients(network, initial(network, 1), x[2:], y[2:], seeds=[8])
    assert not torch.allclose(other[0], first[2])


def test_evaluation_is_without_dropout():
    network = Network(dropout_net())
    module = dropout_net().eval()
    x = normal(1, 6, 4)
    torch.testing.assert_close(
        network.outputs(initial(network), x)[0], module(x[0]).detach(), **EXACT
    )


class Classic(nn.Module):
    """The network of many tutorials: a view after the convolutions, which not every layout allows."""

    def __init__(self, flat):
        super().__init__()
        self.conv, self.out, self.flat = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Linear(4 * 6 * 5, 3),
            flat,
        )

    def forward(self, x):
        x = self.conv(x).relu()
        return self.out(x.view(len(x), -1) if self.flat == "view" else x.flatten(1))


def test_images_come_with_their_channels_innermost_where_the_module_takes_them_so():
    x, found = normal(2, 5, 3, 6, 5), {}
    for flat in ("view", "flatten"):
        with seeded():
            network = Network(Classic(flat).double())
        prepared = network.prepare(x)
        assert torch.equal(prepared, x)
        assert prepared[0].is_contiguous(memory_format=torch.channels_last) == (flat == "flatten")
        # as crop_and_flip leaves them
        assert network.prepare(x.movedim(2, -1).contiguous().movedim(-1, 2))[0].is_contiguous() == (
            flat == "view"
        )
        weights = initial(network, 2)
        found[flat] = (
            network.outputs(weights, x),
            *gradients(network, weights, prepared, labels(2, 5)),
        )
    for one, other in zip(found["view"], found["flatten"], strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_grey_images_too():
    """With one channel both orders are contiguous, and a convolution keeps the order that the
    strides say.
    """
    with seeded():
        conv = torch.nn.Conv2d(1, 4, 3)
        network = Network(
            torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.Linear(4 * 4 * 3, 2))
        )
    prepared = network.prepare(normal(2, 5, 1, 6, 5).float())
    assert prepared[0].stride() == (30, 1, 5, 1)
    assert conv(prepared[0]).stride()[1] == 1
