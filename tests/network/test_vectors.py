"""A torch module as vectors: what goes where, and back."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from builders import Wrapped, batch_norm_net, dropout_net, initial, mlp, perturbed
from gradients import EXACT, TwoHeads, gradients, labels, normal, state, two_heads, unchanged
from torch import nn

from fedhb.errors import InputError
from fedhb.network.vectors import Network


@pytest.mark.parametrize("make", [mlp, batch_norm_net, dropout_net, two_heads])
def test_the_vectors_hold_every_tensor_once(make):
    module = make()
    network = Network(module)
    trained = sum(p.numel() for p in module.parameters())
    assert network.num_params + len(network.head) == trained
    assert len(network.buffers) == sum(b.numel() for b in module.buffers() if b.is_floating_point())
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for slots, vector in (
        (network.body_slots, network.theta),
        (network.head_slots, network.head),
        (network.buffer_slots, network.buffers),
    ):
        assert [s.start for s in slots] == [0, *[s.stop for s in slots]][
            : len(slots)
        ]  # side by side, in order
        for slot in slots:
            assert torch.equal(slot.of(vector), tensors[slot.name])


def test_a_vector_goes_into_the_module_and_comes_back():
    network = Network(two_heads())
    weights = perturbed(network, 2)
    x = normal(2, 5, 4)
    outputs = network.outputs(weights, x)
    for c in range(2):
        module = two_heads().eval()
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        vectors = (
            (network.body_slots, weights.theta),
            (network.head_slots, weights.head),
            (network.buffer_slots, weights.buffers),
        )
        for slots, vector in vectors:
            for slot in slots:
                tensors[slot.name].data.copy_(slot.of(vector[c]))
        torch.testing.assert_close(module(x[c]), outputs[c], **EXACT)
        again = Network(module)
        assert torch.equal(again.theta, weights.theta[c]) and torch.equal(
            again.head, weights.head[c]
        )
        assert torch.equal(again.buffers, weights.buffers[c])


def test_the_head_is_the_last_linear_layer_unless_named():
    module = TwoHeads()
    assert Network(module).head_name == "extra"
    named = Network(module, head="out")
    assert named.head_name == "out" and len(named.head) == 6 * 3 + 3
    assert all(not s.name.startswith("out.") for s in named.body_slots)
    none = Network(module, head="")
    assert len(none.head) == 0 and none.num_params == sum(p.numel() for p in module.parameters())
    container = Network(
        nn.Sequential(
            OrderedDict(body=nn.Linear(2, 2), heads=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
        ),
        head="heads",
    )
    assert len(container.head) == 6 + 9 and container.num_params == 6


def test_a_head_is_not_taken_by_the_beginning_of_its_name():
    module = nn.Sequential(OrderedDict(out=nn.Linear(2, 2), out2=nn.Linear(2, 3)))
    assert [s.name for s in Network(module, head="out").head_slots] == ["out.weight", "out.bias"]


def test_a_single_linear_layer_is_all_body():
    network = Network(nn.Linear(4, 3))
    assert network.head_name == "" and network.num_params == 15 and network.batches_clients


def test_a_head_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match=r"head='fc'.*hidden, act, head"):
        Network(mlp(), head="fc")


def test_nothing_to_train_is_refused():
    with pytest.raises(InputError, match="requires_grad"):
        Network(mlp().requires_grad_(False))
    module = mlp()
    module.hidden.requires_grad_(False)
    with pytest.raises(InputError, match="'head'"):
        Network(module, head="head")


def test_batch_norm_is_a_choice_of_two():
    with pytest.raises(InputError, match="batch_norm='both'"):
        Network(batch_norm_net(), batch_norm="both")


@pytest.mark.parametrize("wrap", [nn.Identity, Wrapped])
def test_frozen_parameters_stay_out_and_keep_their_value(wrap):
    layers = mlp()
    layers.hidden.bias.requires_grad_(False)
    module = layers if wrap is nn.Identity else Wrapped(layers)
    network = Network(module)
    assert network.batches_clients == (wrap is nn.Identity)
    assert not any(
        s.name.endswith("hidden.bias") for s in (*network.body_slots, *network.head_slots)
    )
    frozen = layers.hidden.bias.clone()
    weights = perturbed(network, 2)
    x, y = normal(2, 4, 4), labels(2, 4)
    body, _ = gradients(network, weights, x, y)
    assert body.shape == (2, 4 * 5)
    inside = network.module if wrap is nn.Identity else network.module.inside
    assert torch.equal(inside.hidden.bias, frozen) and inside.hidden.bias.grad is None
    changed = copy.deepcopy(layers)
    changed.hidden.bias.data += 1.0
    other = Network(changed if wrap is nn.Identity else Wrapped(changed))
    assert not torch.allclose(
        other.outputs(weights, x), network.outputs(weights, x)
    )  # so it is used
    assert torch.equal(other.theta, network.theta)


def test_constants_bring_back_vectors_and_frozen_tensors():
    module = two_heads()
    module.offset.requires_grad_(False)
    module.offset.data += 3.0
    trained = Network(module)
    fresh = TwoHeads().double()  # other weights
    fresh.offset.requires_grad_(False)
    network = Network(fresh)
    network.restore(trained.constants())
    weights, x = perturbed(trained, 1), normal(1, 5, 4)
    assert torch.equal(network.outputs(weights, x), trained.outputs(weights, x))
    assert torch.equal(network.theta, trained.theta) and torch.equal(network.head, trained.head)
    ours, theirs = network.gate(2), trained.gate(2)
    assert torch.equal(ours.head, theirs.head) and torch.equal(ours.theta, theirs.theta)
    assert torch.equal(ours.buffers, theirs.buffers)
    with pytest.raises(InputError, match="architecture"):
        Network(mlp()).restore(trained.constants())


def test_the_original_module_is_never_changed():
    for make in (mlp, batch_norm_net, dropout_net):
        module = make()
        module.eval()
        before = state(module)
        for batch_norm in ("running", "batch"):
            network = Network(module, batch_norm=batch_norm)
            weights = perturbed(network, 2)
            gradients(network, weights, normal(2, 4, 4), labels(2, 4))
            network.outputs(weights, normal(2, 4, 4))
            network.gate(2).outputs(initial(network.gate(2), 2), normal(2, 4, 4))
            network.to("cpu")
        assert unchanged(module, before) and not module.training
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    "make", [mlp, batch_norm_net, dropout_net, two_heads, lambda: Wrapped(mlp())]
)
def test_a_gate_exists_for_any_module_with_a_linear_head(make):
    network = Network(make())
    gate = network.gate(4)
    assert torch.equal(gate.theta, network.theta) and torch.equal(gate.buffers, network.buffers)
    assert gate.num_params == network.num_params and gate.batches_clients == network.batches_clients
    inputs = network.module.get_submodule(network.head_name).in_features
    assert gate.head.numel() == 4 * (inputs + 1)
    assert network.outputs(initial(network), normal(1, 5, 4)).shape == (1, 5, 3)
    outputs = gate.outputs(initial(gate), normal(1, 5, 4))
    assert outputs.shape == (1, 5, 4) and outputs.std() > 0
    assert torch.equal(
        Network(make()).gate(4).head, gate.head
    )  # the same on every client and after every restart
    assert gate.head.abs().max() <= inputs**-0.5 and len(gate.head.unique()) == gate.head.numel()


def test_a_gate_reads_the_input_of_the_head():
    module = mlp()
    network = Network(module)
    gate, x = network.gate(2), normal(1, 5, 4)
    features = module.act(module.hidden(x[0])).detach()
    weight, bias = gate.head[:10].view(2, 5), gate.head[10:]
    torch.testing.assert_close(
        gate.outputs(initial(gate), x)[0], features @ weight.T + bias, **EXACT
    )


@pytest.mark.parametrize(
    ("make", "head"), [(mlp, ""), (mlp, "act"), (lambda: nn.Linear(4, 3), None)]
)
def test_no_gate_without_a_linear_head(make, head):
    with pytest.raises(InputError, match="linear head"):
        Network(make(), head=head).gate(2)
