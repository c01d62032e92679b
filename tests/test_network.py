"""A torch module as vectors: what goes where, and that C clients at once get what each would get from torch alone."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict

import pytest
import torch
from builders import Wrapped, batch_norm_net, dropout_net, initial, mlp, perturbed, seeded
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedhb.clients.scaling import Scaling
from fedhb.errors import InputError
from fedhb.network import nets
from fedhb.network.nets.mobilenet import BLOCKS
from fedhb.network.vectors import Network, Weights

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few terms in another order


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(clients, batch, classes=3):
    return torch.randint(classes, (clients, batch), generator=torch.Generator().manual_seed(9))


def cross_entropy(y):
    """The slope that `differentiate` asks for: of the clients' mean losses, all of them or one client's alone."""

    def slope(outputs, client):
        target = y if client is None else y[client : client + 1, : outputs.shape[1]]
        outputs = outputs.clone().requires_grad_()
        each = functional.cross_entropy(outputs.flatten(0, 1), target.flatten(), reduction="none")
        return torch.autograd.grad(each.view(target.shape).mean(1).sum(), outputs)[0]

    return slope


def gradients(network, weights, x, y, train_head=True, counts=None, seeds=None):
    count, batch = y.shape
    body = torch.full_like(weights.theta, torch.nan)  # whatever is not written stays NaN
    head = torch.full_like(weights.head, torch.nan) if train_head else None
    bound = network.bind(weights, body, head)
    bound.differentiate(
        x, cross_entropy(y), counts=counts or [batch] * count, seeds=seeds or list(range(count))
    )
    return body, head


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module, before):
    after = module.state_dict()
    return before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


class TwoHeads(nn.Module):
    """Layers that do not stand in the order of their use, a parameter of its own, a scalar, and buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten())
        self.offset = nn.Parameter(torch.zeros(6))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return (
            self.extra(self.out(self.body(x.unsqueeze(1)) * self.scale + self.offset))
            / self.temperature
        )


def two_heads():
    with seeded():
        return TwoHeads().double()


# ---- vectors


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
    with pytest.raises(
        InputError, match=r"head='fc' names no submodule: choose from hidden, act, head"
    ):
        Network(mlp(), head="fc")


def test_nothing_to_train_is_refused():
    with pytest.raises(InputError, match="no trainable parameters"):
        Network(mlp().requires_grad_(False))
    module = mlp()
    module.hidden.requires_grad_(False)
    with pytest.raises(InputError, match="beside the head 'head'"):
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
    with pytest.raises(InputError, match="same architecture and head"):
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


# ---- the stacked path equals torch's own evaluation, client by client

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
    """FedPop's chain moves heads under a fixed body: what lies below the head is evaluated, not differentiated."""
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


def test_inputs_are_scaled():
    module, scaling = (
        mlp(),
        Scaling(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 1.0, 2.0, 4.0])),
    )
    network = Network(module, scaling=scaling)
    x = normal(1, 5, 4)
    expected = module((x[0] - scaling.mean) / scaling.std).detach()
    torch.testing.assert_close(network.outputs(initial(network), x)[0], expected, **EXACT)


# ---- batch norm and other buffers


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


# ---- randomness


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


# ---- columns, the units of dropout


def test_columns_are_the_weights_that_leave_one_input_unit():
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 3, 2),
            depthwise=nn.Conv2d(3, 3, 2, groups=3),
            transposed=nn.ConvTranspose2d(3, 2, 2),
            flat=nn.Flatten(),
            hidden=nn.Linear(32, 4),
            head=nn.Linear(4, 3),
        )
    )
    network = Network(module)
    columns = network.columns
    places = torch.arange(network.num_params).unsqueeze(0)
    groups = [
        column.flatten() for column in columns.of(places, [(0, g) for g in range(len(columns))])
    ]
    assert len(groups) == 2 + 3 + 3 + 32  # none for biases, none in the head
    members = torch.cat(groups).tolist()
    assert len(set(members)) == len(members)
    marked = {slot.name: slot for slot in network.body_slots}

    def holds(group, name, index):
        vector = torch.zeros(network.num_params)
        vector[group] = 1.0
        expected = torch.zeros(marked[name].shape)
        expected[index] = 1.0
        return torch.equal(marked[name].of(vector), expected) and vector.sum() == expected.sum()

    assert all(holds(groups[i], "conv.weight", (slice(None), i)) for i in range(2))
    assert all(holds(groups[2 + i], "depthwise.weight", (i,)) for i in range(3))
    assert all(holds(groups[5 + i], "transposed.weight", (i,)) for i in range(3))
    assert all(holds(groups[8 + i], "hidden.weight", (slice(None), i)) for i in range(32))


def test_columns_are_kept_with_the_given_probability():
    columns = Network(nn.Sequential(nn.Linear(400, 2), nn.Linear(2, 2))).columns
    drops = columns.drops(0.9, torch.Generator().manual_seed(0))
    dropped = [len(next(drops)) / 400 for _ in range(200)]
    # 80,000 draws: the standard error of the mean is 0.001
    assert abs(sum(dropped) / 200 - 0.1) < 0.005
    assert next(columns.drops(0.0, torch.Generator())) == list(range(400))


def test_columns_lie_where_they_say():
    columns = Network(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))).columns
    vectors = torch.arange(32).view(4, 8)[
        1:
    ]  # weight [2, 3] and bias [2] of the body; rows of a larger matrix
    assert [column.tolist() for column in columns.of(vectors, [(0, 1), (2, 0)])] == [
        [9, 12],
        [24, 27],
    ]
    assert columns.of(vectors, []) == []


# ---- the gate


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
    with pytest.raises(InputError, match="a gate needs a linear head"):
        Network(make(), head=head).gate(2)


# ---- the paper's networks


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
    """MobileNet as its paper defines it, in its training mode: padded convolutions, batch norm, ReLU, pooling, a linear layer."""

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


def test_mlp_knows_the_client_axis():
    network = Network(nets.mlp((1, 28, 28), 10))
    assert (
        network.batches_clients
        and network.num_params == 784 * 256 + 256
        and len(network.head) == 2570
    )


@pytest.mark.parametrize("shape", [(784,), (3, 8, 8)])
def test_mobilenet_needs_images(shape):
    with pytest.raises(InputError, match="at least 16x16"):
        nets.mobilenet(shape, 10)


def test_a_network_is_found_by_its_name():
    assert isinstance(nets.build("mlp", (4,), 3, hidden=7).hidden, nn.Linear)
    with pytest.raises(InputError, match="unknown model 'mpl'"):
        nets.build("mpl", (4,), 3)


# ---- the layout of images


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
    """With one channel both orders are contiguous, and a convolution keeps the order that the strides say."""
    with seeded():
        conv = torch.nn.Conv2d(1, 4, 3)
        network = Network(
            torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.Linear(4 * 4 * 3, 2))
        )
    prepared = network.prepare(normal(2, 5, 1, 6, 5).float())
    assert prepared[0].stride() == (30, 1, 5, 1)
    assert conv(prepared[0]).stride()[1] == 1
