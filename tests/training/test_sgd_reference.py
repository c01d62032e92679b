"""The fast solver agrees with a slow and readable one on every kind of network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import reference_solver
import torch
from torch import Tensor, nn

from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical, GaussianRegression, Likelihood
from fedhb.network.vectors import Network, Weights, tensor_sizes
from fedhb.seeding import Randomness
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import Sgd, train

RNG = Randomness(seed=3, round=2)
CLASSES = 3


class Residual(nn.Module):
    """A module of one's own: a skip connection, a number, and a weight that its outputs ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, CLASSES)  # not the last in the order of evaluation
        self.inner = nn.Linear(5, 5)
        self.first = nn.Linear(4, 5)
        self.strength = nn.Parameter(torch.tensor(0.7))
        self.ignored = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden + self.strength * torch.tanh(self.inner(hidden)))


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 5), nn.GELU()), nn.Linear(5, CLASSES)
    )


def frozen(make: Callable[[], nn.Module], *names: str) -> nn.Module:
    module = make()
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES), nn.Identity()
    )


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES))


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, CLASSES))


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "linear stack": (stack, {}),
    "one linear layer": (lambda: nn.Linear(4, CLASSES), {}),
    "own module": (Residual, {"head": "out"}),
    "convolution": (convolution, {}),
    "batch norm, running": (normalised, {"batch_norm": "running"}),
    "batch norm, batch": (normalised, {"batch_norm": "batch"}),
    "frozen in a stack": (lambda: frozen(stack, "0.weight", "2.0.bias"), {}),
    "frozen in a module": (lambda: frozen(Residual, "first.weight"), {"head": "out"}),
    "dropout of its own": (noisy, {}),
}


def network_of(kind: str) -> Network:
    make, options = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(make().double(), **options)


def clients_of(sizes: tuple[int, ...], shape: tuple[int, ...] = (4,)) -> Clients:
    random = np.random.default_rng(1)
    pairs = [(random.normal(size=(n, *shape)), random.integers(0, CLASSES, n)) for n in sizes]
    return Clients.from_arrays(pairs, num_classes=CLASSES)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def start_of(network: Network, count: int) -> Weights:
    """Weights that differ between clients; buffers stay positive."""
    vectors = (network.theta, network.head, network.buffers)
    theta, head, buffers = (vector.expand(count, -1).clone() for vector in vectors)
    theta += 0.2 * normal(*theta.shape, seed=4)
    head += 0.2 * normal(*head.shape, seed=5)
    buffers += normal(*buffers.shape, seed=6).abs()
    return Weights(theta, head, buffers)


def copy_of(weights: Weights) -> Weights:
    return Weights(weights.theta.clone(), weights.head.clone(), weights.buffers.clone())


def pulls_of(kind: str, network: Network, count: int) -> Penalty:
    """Pulls on body and head, of one of the kinds that algorithms use."""
    if kind == "none":
        return Penalty()
    d, h = network.num_params, len(network.head)
    each = normal(count, 1, seed=7).exp()  # a strength of each client
    if kind == "to one place":
        number = torch.full((1, 1), 0.8, dtype=torch.float64)
        return Penalty(Pull(number, network.theta - 0.3), Pull(number, network.head + 0.2))
    if kind == "a strength and place of each client":
        mu = each * normal(count, d, seed=8).exp()
        place = normal(count, d, seed=9)
        return Penalty(Pull(mu, place), Pull(each, normal(count, h, seed=10)))
    if kind == "to a place that moves":
        points = normal(2, d, seed=11)

        def shares(m: Tensor) -> Tensor:
            return (m @ points.T).softmax(1)

        return Penalty(Pull(each, points, shares))
    body = tensor_sizes(network, with_head=False)
    mu = each * torch.arange(1.0, len(body) + 1, dtype=torch.float64)
    return Penalty(Pull(mu, network.theta, layers=body))


PULLS = (
    "none",
    "to one place",
    "a strength and place of each client",
    "to a place that moves",
    "a strength of each tensor",
)


def assert_agree(
    network: Network,
    fast: tuple[Weights, dict[str, Tensor]],
    slow: tuple[Weights, dict[str, Tensor]],
    start: Weights,
) -> None:
    for name in ("theta", "head", "buffers"):
        torch.testing.assert_close(
            getattr(fast[0], name), getattr(slow[0], name), rtol=1e-6, atol=1e-9, msg=name
        )
    for key in ("loss", "score"):
        torch.testing.assert_close(fast[1][key].double(), slow[1][key].double(), msg=key)
    assert (fast[0].theta - start.theta).abs().amax(1).min() > 1e-3  # all clients have moved


@pytest.mark.parametrize(
    ("train_head", "sizes"),  # with batches of four, the last clients run out first, or others do
    [(False, (9, 6, 3)), (True, (3, 9, 6))],
    ids=["body", "full"],
)
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_solver_agrees_with_the_slow_one(
    kind: str, momentum: float, pull: str, train_head: bool, sizes: tuple[int, ...]
) -> None:
    network = network_of(kind)
    shape = (1, 3, 3) if kind == "convolution" else (4,)
    clients = clients_of(sizes, shape)
    plan = Plan(epochs=2, batch_size=4, lr=0.1, momentum=momentum, train_head=train_head)
    start, penalty = start_of(network, len(sizes)), pulls_of(pull, network, len(sizes))
    setting = (clients, plan, RNG, penalty)
    likelihood = Categorical(CLASSES)
    slow = reference_solver.train(network, likelihood, copy_of(start), *setting)
    fast = train(network, likelihood, copy_of(start), *setting)
    assert_agree(network, fast, slow, start)


@pytest.mark.parametrize("likelihood", [GaussianRegression(2), GaussianRegression(1, noise=0.5)])
def test_they_agree_on_real_targets(likelihood: Likelihood) -> None:
    random = np.random.default_rng(2)
    targets = likelihood.num_targets
    pairs = [(random.normal(size=(n, 4)), random.normal(size=(n, targets))) for n in (7, 4, 9)]
    clients = Clients.from_arrays(pairs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, likelihood.num_outputs)
        network = Network(nn.Sequential(*layers).double(), scaling=clients.scaling)
    plan = Plan(epochs=2, batch_size=4, lr=0.02, momentum=0.9, train_head=True)
    start, penalty = start_of(network, 3), pulls_of("to one place", network, 3)
    setting = (clients, plan, RNG, penalty)
    slow = reference_solver.train(network, likelihood, copy_of(start), *setting)
    fast = train(network, likelihood, copy_of(start), *setting)
    assert_agree(network, fast, slow, start)


@pytest.mark.parametrize("kind", ["linear stack", "own module"])
def test_they_agree_on_weighted_examples(kind: str) -> None:
    network, clients, likelihood = network_of(kind), clients_of((9, 3, 6)), Categorical(CLASSES)
    plan = Plan(epochs=2, batch_size=4, lr=0.1, momentum=0.9, train_head=True)
    start, weights = start_of(network, 3), normal(18, seed=12).exp()
    slow = reference_solver.train(
        network, likelihood, copy_of(start), clients, plan, RNG, Penalty(), weights
    )
    solver = Sgd(network, copy_of(start), plan)
    for batch in batches(clients, plan, RNG):
        solver.step(batch, likelihood, example_weights=weights[batch.held])
    assert_agree(network, (solver.weights, solver.report()), slow, start)
