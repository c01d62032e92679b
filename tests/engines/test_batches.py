"""Minibatches of many clients at once: each client gets its own data, in its own order, and nothing of the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import CLASSES, PLAN, batch_norm_net, clients, initial, mlp, same_bits
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training.batches import batches, crop_and_flip
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import Sgd, train

RNG = Randomness(5, 3)


def numbered(sizes):
    """Clients whose examples are numbered: x of client k's n-th example is 1000 k + n."""
    pairs = [
        ((1000.0 * k + np.arange(n)).reshape(-1, 1), np.arange(n) % CLASSES)
        for k, n in enumerate(sizes)
    ]
    return Clients.from_arrays(pairs, num_classes=CLASSES)


def positions(batch, count):
    return torch.arange(count)[batch.active].tolist()


def seen(who, plan, merge_single=False):
    """What each client sees, batch by batch, without padding: lists of (x, y) lists."""
    found = [[] for _ in range(len(who))]
    for batch in batches(who, plan, RNG, merge_single=merge_single):
        active = positions(batch, len(who))
        assert (
            len(active)
            == len(batch.x)
            == len(batch.y)
            == len(batch.counts)
            == len(batch.generators)
        )
        for a, k in enumerate(active):
            n = batch.counts[a]
            found[k].append((batch.x[a, :n, 0].tolist(), batch.y[a, :n].tolist(), batch.last_epoch))
            if batch.valid is None:
                assert n == batch.x.shape[1]
            else:
                assert batch.valid[a].tolist() == [1.0] * n + [0.0] * (batch.x.shape[1] - n)
            assert batch.x.shape[1] == max(batch.counts)
    return found


@given(st.lists(st.integers(1, 23), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 3))
def test_every_example_exactly_once_per_epoch(sizes, width, epochs):
    plan = replace(PLAN, batch_size=width, epochs=epochs)
    for k, (n, found) in enumerate(zip(sizes, seen(numbered(sizes), plan), strict=True)):
        per_epoch = -(-n // width)
        assert len(found) == per_epoch * epochs
        for e in range(epochs):
            epoch = found[e * per_epoch : (e + 1) * per_epoch]
            assert sorted(x for xs, _, _ in epoch for x in xs) == [1000.0 * k + i for i in range(n)]
            assert all(len(xs) == width for xs, _, _ in epoch[:-1])
            assert all(
                y == int(x) % 1000 % CLASSES
                for xs, ys, _ in epoch
                for x, y in zip(xs, ys, strict=True)
            )
            assert {last for _, _, last in epoch} == {e == epochs - 1}


def test_epochs_and_clients_are_shuffled_differently():
    plan = replace(PLAN, batch_size=20, epochs=2)
    first, second = seen(numbered([20, 20]), plan)
    orders = [[x % 1000 for x in xs] for xs, _, _ in (*first, *second)]
    assert len({tuple(o) for o in orders}) == 4 and list(range(20)) not in orders


@given(st.lists(st.integers(1, 23), min_size=2, max_size=5), st.integers(1, 9))
def test_a_clients_batches_do_not_depend_on_the_others(sizes, width):
    plan, who = replace(PLAN, batch_size=width), numbered(sizes)
    together = seen(who, plan)
    assert [seen(who.select([k]), plan)[0] for k in range(len(sizes))] == together
    backwards = list(range(len(sizes)))[::-1]
    assert seen(who.select(backwards), plan) == together[::-1]


@pytest.mark.parametrize(
    ("n", "width", "counts"),
    [
        (9, 4, [4, 5]),
        (8, 4, [4, 4]),
        (10, 4, [4, 4, 2]),
        (5, 4, [5]),
        (4, 4, [4]),
        (2, 4, [2]),
        (13, 4, [4, 4, 5]),
    ],
)
def test_a_last_batch_of_one_joins_the_one_before(n, width, counts):
    plan = replace(PLAN, batch_size=width, epochs=1)
    (found,) = seen(numbered([n]), plan, merge_single=True)
    assert [len(xs) for xs, _, _ in found] == counts
    assert sorted(x for xs, _, _ in found for x in xs) == list(range(n))


def test_batch_norm_never_sees_one_example():
    with pytest.raises(InputError, match="client 1 has a single example"):
        list(batches(numbered([3, 1]), PLAN, RNG, merge_single=True))
    plan = replace(PLAN, batch_size=1)
    with pytest.raises(InputError, match="batch_size=1"):
        list(batches(numbered([4]), plan, RNG, merge_single=True))


# ---- training on them


def pull(network, count):
    return Pull(
        torch.linspace(0.1, 0.5, count, dtype=torch.float64).unsqueeze(1), network.theta + 0.1
    )


def result(network, who, rng=RNG, plan=PLAN, **options):
    weights, reports = train(
        network, Categorical(CLASSES), initial(network, len(who)), who, plan, rng, **options
    )
    return {"theta": weights.theta, "head": weights.head, "buffers": weights.buffers} | reports


@pytest.mark.parametrize("order", [[2, 5, 0, 3, 1, 4], [0, 1, 2, 3, 4, 5], [4, 2, 1]])
@pytest.mark.parametrize("make", [mlp, batch_norm_net])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_out_of_batches_stands_still(momentum, make, order):
    """In a group of ragged clients each ends where it ends alone: weights, momentum (two epochs) and buffers."""
    network, who, plan = (
        Network(make()),
        clients().select(order),
        replace(PLAN, momentum=momentum, train_head=True),
    )
    together = result(network, who, plan=plan)
    for k in range(len(who)):
        alone = result(network, who.select([k]), plan=plan)
        for key, value in alone.items():
            torch.testing.assert_close(
                together[key][k],
                value[0],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda t, key=key: f"{key}: {t}",
            )


def test_the_pull_on_ragged_clients_is_each_clients_own():
    network, who = Network(mlp()), clients()
    strengths = pull(network, len(who))
    together = result(network, who, penalty=Penalty(strengths))
    for k in range(len(who)):
        alone = result(
            network,
            who.select([k]),
            penalty=Penalty(Pull(strengths.mu[k : k + 1], strengths.target)),
        )
        torch.testing.assert_close(together["theta"][k], alone["theta"][0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together["theta"], result(network, who)["theta"])


@pytest.mark.parametrize("make", [mlp, batch_norm_net])
def test_padding_does_not_matter(make, monkeypatch):
    network, who = Network(make()), clients()
    before = result(network, who)
    padded = 0

    def other_padding(*args, **kwargs):
        nonlocal padded
        for batch in batches(*args, **kwargs):
            for a, n in enumerate(batch.counts):
                padded += batch.x.shape[1] - n
                batch.x[a, n:] = 77.0
                batch.y[a, n:] = 1
            yield batch

    monkeypatch.setattr("fedhb.training.sgd.batches", other_padding)
    after = result(network, who)
    assert padded > 0 and same_bits(before, after)


def test_momentum_stands_still_too():
    """A step for some clients only moves neither the weights nor the velocity of the others."""
    network, who = Network(mlp()), clients((4, 4, 4))
    weights = initial(network, 3)
    solver = Sgd(network, weights, PLAN)
    first, second = list(batches(who, PLAN, RNG))
    solver.step(first, Categorical(CLASSES))
    theta, velocity = weights.theta.clone(), solver._parts[0].velocity.clone()
    rows = torch.tensor([2, 0])
    part = replace(
        second,
        active=rows,
        x=second.x[rows],
        y=second.y[rows],
        counts=[4, 4],
        generators=second.generators[:2],
    )
    solver.step(part, Categorical(CLASSES))
    assert torch.equal(weights.theta[1], theta[1]) and torch.equal(
        solver._parts[0].velocity[1], velocity[1]
    )
    assert not torch.equal(weights.theta[0], theta[0]) and not torch.equal(
        weights.theta[2], theta[2]
    )


def test_plain_training_is_torch_sgd():
    """One client without a prior: the weights of torch.optim.SGD with momentum on the same minibatches."""
    network, who = Network(mlp()), clients((11,))
    ours = result(network, who)
    module_ = mlp()
    module_.head.requires_grad_(False)
    optimiser = torch.optim.SGD(
        [p for p in module_.parameters() if p.requires_grad], lr=PLAN.lr, momentum=PLAN.momentum
    )
    losses = []
    for batch in batches(who, PLAN, RNG):
        loss = torch.nn.functional.cross_entropy(module_(batch.x[0].double()), batch.y[0])
        if batch.last_epoch:
            losses += [loss.item()] * len(batch.y[0])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(
        ours["theta"][0], Network(module_, head="head").constants()["theta"], rtol=1e-12, atol=1e-12
    )
    assert ours["loss"].item() == pytest.approx(np.mean(losses), rel=1e-12)
    assert ours["examples"].item() == 11


def test_the_head_is_trained_only_when_asked():
    network, who = Network(mlp()), clients()
    still = result(network, who)["head"]
    assert torch.equal(still, network.head.expand_as(still))
    weights, _ = train(
        network,
        Categorical(CLASSES),
        initial(network, len(who)),
        who,
        replace(PLAN, train_head=True),
        RNG,
    )
    assert (weights.head != network.head).any(1).all()


def test_reports_are_means_over_the_last_epoch():
    """With a step of size zero they are the loss and the accuracy of the starting point."""
    network, who = Network(mlp()), clients()
    weights, reports = train(
        network,
        Categorical(CLASSES),
        initial(network, len(who)),
        who,
        replace(PLAN, lr=1e-300),
        RNG,
    )
    for k in range(len(who)):
        x, y = who.train.examples(k)
        outputs = network.outputs(
            Weights(weights.theta[k : k + 1], weights.head[k : k + 1], weights.buffers[k : k + 1]),
            x[None],
        )
        assert reports["loss"][k].item() == pytest.approx(
            Categorical(CLASSES).loss(outputs, y[None]).mean().item(), rel=1e-9
        )
        assert reports["score"][k].item() == pytest.approx(
            (outputs[0].argmax(1) == y).double().mean().item()
        )


class Writes(torch.nn.Module):
    """A network that changes its input."""

    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def forward(self, x):
        return self.inside(x.sub_(0.5))


@pytest.mark.parametrize("standardise", [True, False])
def test_a_module_may_write_into_its_input(standardise):
    """The networks that share a batch, and the next epoch, get it as it was."""
    pairs = [(np.arange(12.0).reshape(3, 4), np.arange(3) % CLASSES)]
    who = Clients.from_arrays(pairs, num_classes=CLASSES, standardise=standardise)
    network = Network(Writes(), scaling=who.scaling)
    (batch,) = list(batches(who, replace(PLAN, epochs=1), RNG))
    before = network.prepare(batch.x).clone()
    first = batch.inputs(network)
    assert batch.inputs(network) is first
    first.sub_(0.5)
    assert torch.equal(batch.inputs(network), before)


# ---- augmentation


def images(clients_, batch, height=6, width=5, seed=0):
    return torch.randint(
        1, 256, (clients_, batch, 3, height, width), generator=torch.Generator().manual_seed(seed)
    )


def generators(*seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


def explicit(x, generator, padding=4):
    """One client's images, one after another: pad with zeros, cut out, mirror."""
    n, _, height, width = x.shape
    tops = torch.randint(2 * padding + 1, (n,), generator=generator).tolist()
    lefts = torch.randint(2 * padding + 1, (n,), generator=generator).tolist()
    flips = torch.randint(2, (n,), generator=generator).tolist()
    out = torch.empty_like(x)
    for i in range(n):
        canvas = torch.zeros(3, height + 2 * padding, width + 2 * padding, dtype=x.dtype)
        canvas[:, padding : padding + height, padding : padding + width] = x[i]
        cut = canvas[:, tops[i] : tops[i] + height, lefts[i] : lefts[i] + width]
        out[i] = cut.flip(-1) if flips[i] else cut
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_against_the_slow_way(dtype):
    x = images(3, 40).to(dtype)
    found = crop_and_flip(x, generators(1, 2, 3), [40, 40, 40])
    assert found.dtype == dtype and found.shape == x.shape
    for k, generator in enumerate(generators(1, 2, 3)):
        assert torch.equal(found[k], explicit(x[k], generator))


def test_crop_and_flip_is_each_clients_own():
    x = images(2, 6)
    together = crop_and_flip(x, generators(1, 2), [6, 4])
    assert torch.equal(crop_and_flip(x[1:, :4], generators(2), [4])[0], together[1, :4])
    assert torch.equal(crop_and_flip(x, generators(1, 2), [6, 4]), together)
    assert not torch.equal(crop_and_flip(x, generators(1, 3), [6, 4])[1, :4], together[1, :4])


def test_batches_are_augmented_where_the_data_say_so():
    x = images(1, 12)[0].numpy().astype(np.uint8)
    pairs = [(x[:7], np.zeros(7, int)), (x[7:], np.zeros(5, int))]
    plain = Clients.from_arrays(pairs, num_classes=1)
    augmented = replace(plain, augment="crop-flip")
    changed = 0
    for one, other in zip(batches(plain, PLAN, RNG), batches(augmented, PLAN, RNG), strict=False):
        changed += not torch.equal(one.x, other.x)
    assert changed
    together = [b.x[1, : b.counts[1]] for b in batches(augmented, PLAN, RNG) if len(b.x) == 2]
    alone = [b.x[0] for b in batches(augmented.select([1]), PLAN, RNG)]
    assert len(together) == len(alone) == 4
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
