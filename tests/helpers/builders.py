"""Small problems that several tests use: clients of different sizes, networks of every kind, every
algorithm.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import ALGORITHMS, Federation, Hierarchical, Mixture, Plan, Problem, build
from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights

SIZES = (7, 3, 12, 5, 2, 9)
"""With batches of four: clients with one to three batches, full and ragged ones, and one last batch
of a single example.
"""

FEATURES, CLASSES = 4, 3
PLAN = Plan(epochs=2, batch_size=4, lr=0.1, momentum=0.9, train_head=False)


class Wrapped(nn.Module):
    """A module of one's own around any other: the network then knows nothing of its layers."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


@contextlib.contextmanager
def seeded(seed: int = 0):
    """Torch's global randomness from this seed, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0, outputs: int = CLASSES) -> nn.Sequential:
    """Two linear layers and an activation: the kind of network that knows the client axis."""
    with seeded(seed):
        layers = OrderedDict(
            hidden=nn.Linear(FEATURES, 5), act=nn.Tanh(), head=nn.Linear(5, outputs)
        )
        return nn.Sequential(layers).to(dtype)


def dropout_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network with randomness of its own."""
    with seeded():
        layers = OrderedDict(
            hidden=nn.Linear(FEATURES, 5),
            drop=nn.Dropout(0.3),
            act=nn.Tanh(),
            head=nn.Linear(5, CLASSES),
        )
        return nn.Sequential(layers).to(dtype)


def batch_norm_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network with running statistics."""
    with seeded():
        layers = OrderedDict(
            hidden=nn.Linear(FEATURES, 5),
            norm=nn.BatchNorm1d(5),
            act=nn.ReLU(),
            head=nn.Linear(5, CLASSES),
        )
        return nn.Sequential(layers).to(dtype)


def general_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network with both."""
    with seeded():
        body = OrderedDict(
            hidden=nn.Linear(FEATURES, 5),
            norm=nn.BatchNorm1d(5),
            drop=nn.Dropout(0.3),
            act=nn.ReLU(),
        )
        return nn.Sequential(body | OrderedDict(head=nn.Linear(5, CLASSES))).to(dtype)


NETWORKS = {
    "mlp": mlp,
    "dropout": dropout_net,
    "batch norm": batch_norm_net,
    "general": general_net,
}


def arrays(
    sizes=SIZES, seed: int = 0, classes: int = CLASSES
) -> list[tuple[np.ndarray, np.ndarray]]:
    """One (x, y) pair per client: each class has a mean of its own, each client a shift of its own."""
    means = np.random.default_rng(123).normal(size=(classes, FEATURES))
    pairs = []
    for k, n in enumerate(sizes):
        rng = np.random.default_rng([seed, k])
        y = rng.integers(0, classes, n)
        x = (
            1.5 * means[y]
            + 0.3 * np.random.default_rng([99, k]).normal(size=FEATURES)
            + rng.normal(size=(n, FEATURES))
        )
        pairs.append((x, y))
    return pairs


def clients(sizes=SIZES, test: int = 3, **options: Any) -> Clients:
    """Clients of these sizes, with `test` test examples each, and inputs that the server holds."""
    who = Clients.from_arrays(
        arrays(sizes), arrays([test] * len(sizes), seed=1), num_classes=CLASSES, **options
    )
    return replace(who, server_inputs=torch.from_numpy(arrays([8], seed=5)[0][0]).float())


def problem(model: nn.Module | None = None, who: Clients | None = None, **options: Any) -> Problem:
    """A problem in float64 unless the model says otherwise."""
    who = clients() if who is None else who
    network = Network(mlp() if model is None else model, scaling=who.scaling, **options)
    return Problem(
        network,
        Categorical(CLASSES),
        Federation(len(who), who.num_examples, CLASSES, who.server_inputs),
    )


def plan(algorithm: Any, **changes: Any) -> Plan:
    """The plan of the engine for this algorithm."""
    return replace(PLAN, train_head=algorithm.update == "full", **changes)


def cases() -> dict[str, Any]:
    """Every algorithm with every kind of update, and with memory where it has one."""
    found = {}
    for name, cls in ALGORITHMS.items():
        for update in ("body", "full"):
            found[f"{name}-{update}"] = build(name, {"update": update})
        if issubclass(cls, Hierarchical):
            found[f"{name}-last"] = build(name, {"begin": "last"})
    # prototypes far enough apart for the clients to have different ones
    found["mixture-three"] = Mixture(num_prototypes=3, noise=0.3, update="full", begin="last")
    found["ensemble-preset"] = build(
        "ensemble", {"mode": "preset", "num_models": 3, "update": "full"}
    )
    found["empirical-bayes-dropout"] = fedhb.EmpiricalBayes(p_do=0.7, num_samples=2)
    found["niw-coordinate"] = fedhb.NIW(dof="per_coordinate", update="full")
    return found


CASES = cases()


def initial(network: Network, count: int = 1) -> Weights:
    """The network's own weights for `count` clients."""
    return Weights(
        *(v.expand(count, -1).clone() for v in (network.theta, network.head, network.buffers))
    )


def perturbed(network: Network, count: int, seed: int = 0) -> Weights:
    """Different weights for every client; the buffers stay positive."""
    generator = torch.Generator().manual_seed(seed)
    weights = initial(network, count)
    for value in (weights.theta, weights.head):
        value += 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    weights.buffers += torch.rand(
        weights.buffers.shape, generator=generator, dtype=weights.buffers.dtype
    )
    return weights


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-10, what: str = "") -> None:
    """Dictionaries of arrays with the same keys and, to this tolerance, the same values."""
    assert ours.keys() == theirs.keys(), what
    for key in ours:
        torch.testing.assert_close(
            ours[key],
            theirs[key],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, key=key: f"{what} {key}: {text}",
        )


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether two dictionaries of arrays are equal to the last bit (and hold no NaN)."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
