"""Small problems for the tests of this folder, in float64, where an identity holds to rounding.

Inputs and targets are stored in float32, as the library stores them; to convert them to float64 is
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhb.algorithms import NIW, Arrays, Federation, Mixture, Plan, Problem
from fedhb.algorithms.toolbox import add, repeat
from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical, Likelihood
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness

RNG = Randomness(seed=0, round=1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ---- modules


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module in float64 whose initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def mlp(*widths: int, seed: int = 0) -> nn.Module:
    """Linear layers with tanh between them; evaluated for all clients at once."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return seeded(build, seed)


def linear(inputs: int, seed: int = 0) -> nn.Module:
    """x -> w . x: a body of `inputs` weights, no head."""
    return seeded(lambda: nn.Linear(inputs, 1, bias=False), seed)


def convnet(classes: int = 3, seed: int = 0) -> nn.Module:
    """A convolution under a linear head, for images [1, 4, 4]; evaluated client by client."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, classes)),
        seed,
    )


# ---- clients


def labelled(
    *sizes: int, shape: tuple[int, ...] = (4,), classes: int = 3, seed: int = 0
) -> Clients:
    """Clients with this many examples each, random labels."""
    random = np.random.default_rng(seed)
    pairs = [(random.normal(size=(n, *shape)), random.integers(0, classes, n)) for n in sizes]
    return Clients.from_arrays(pairs, num_classes=classes)


def regression(
    *sizes: int, inputs: int = 3, spread: float = 0.5, noise: float = 0.3, seed: int = 0
) -> Clients:
    """Clients whose targets are linear in the inputs, with coefficients spread around common ones."""
    random = np.random.default_rng(seed)
    common = random.normal(size=inputs)
    pairs = []
    for n in sizes:
        x = random.normal(size=(n, inputs))
        pairs.append(
            (x, x @ (common + spread * random.normal(size=inputs)) + noise * random.normal(size=n))
        )
    return Clients.from_arrays(pairs)


def examples(clients: Clients, c: int) -> tuple[Tensor, Tensor]:
    """The training examples of one client, real numbers in float64."""
    x, y = clients.train.examples(c)
    return x.double(), y.double() if y.is_floating_point() else y


# ---- the paper's algorithms as printed, whatever the defaults are; options say what differs


def niw(**options: Any) -> NIW:
    printed = {
        "p_do": 0.999,
        "eps": 1e-4,
        "lambda0": 1.0,
        "prior_scale": 1.0,
        "dof": "full",
        "precision": "mode",
    }
    return NIW(
        **{
            "kl_weight": 1.0,
            "num_samples": 1,
            "update": "body",
            "begin": "global",
            **printed,
            **options,
        }
    )


def mixture(**options: Any) -> Mixture:
    printed = {"num_prototypes": 2, "sigma2": 0.1, "shrink": True, "noise": 1e-3, "patience": 30}
    return Mixture(**{"kl_weight": 1.0, "update": "body", "begin": "global", **printed, **options})


# ---- problems and steps


def problem_of(
    module: nn.Module,
    clients: Clients,
    likelihood: Likelihood | None = None,
    *,
    head: str | None = None,
    **federation: int,
) -> Problem:
    """The problem of these clients; `num_clients` and `num_examples` may differ, where the clients
    are a cohort.
    """
    sizes = {"num_clients": len(clients), "num_examples": clients.num_examples} | federation
    likelihood = likelihood or Categorical(clients.num_classes or 0)
    return Problem(
        Network(module, head=head), likelihood, Federation(**sizes, num_classes=clients.num_classes)
    )


def vector_problem(d: int, *, num_clients: int, num_examples: int) -> Problem:
    """A network of d weights for tests of the server, which sees no data."""
    return problem_of(
        linear(d), labelled(1, shape=(d,)), num_clients=num_clients, num_examples=num_examples
    )


def plan_of(
    epochs: int = 1,
    batch_size: int = 4,
    lr: float = 0.1,
    momentum: float = 0.9,
    train_head: bool = False,
) -> Plan:
    return Plan(epochs, batch_size, lr, momentum, train_head)


def initial(network: Network, count: int) -> Weights:
    """The network's own weights for `count` clients."""
    return Weights(*(repeat(v, count) for v in (network.theta, network.head, network.buffers)))


def aggregate(
    algorithm: Any, problem: Problem, server: Arrays, m: Tensor, chunk: int | None = None
) -> Arrays:
    """The server's next state after it received m [N_f, d] in chunks."""
    total = None
    received = algorithm.broadcast(server, range(len(m)))
    for part in m.split(chunk or len(m)):
        found = {"m": part, "examples": torch.ones(len(part), dtype=torch.float64)}
        total = add(total, algorithm.summarise(problem, received, found, RNG))
    assert total is not None
    return algorithm.aggregate(problem, server, total, RNG)


# ---- runs to compare


TRAINING: dict[str, Any] = {
    "rounds": 3,
    "fraction": 0.6,
    "local_epochs": 2,
    "batch_size": 4,
    "seed": 2,
    "progress": False,
}
"""Keywords of `fedhb.fit` for a short run."""


def batch_normed() -> nn.Module:
    """A network with running statistics."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    )


def same_bits(one: Arrays, other: Arrays) -> bool:
    """Return whether both have the same keys and, to the last bit, the same values."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def same_network(one: Arrays, other: Arrays) -> bool:
    """Return whether theta, head and buffers, where both have them, are equal to the last bit."""
    keys = [{"theta", "head", "buffers"} & arrays.keys() for arrays in (one, other)]
    return keys[0] == keys[1] and all(torch.equal(one[key], other[key]) for key in keys[0])
