"""The task of all contenders: one network, data, cohorts and order of the examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedhb.algorithms import Federation, Plan, Problem
from fedhb.clients.clients import Clients
from fedhb.engine.schedule import cohort
from fedhb.likelihood import Categorical
from fedhb.network import nets
from fedhb.network.nets.mobilenet import FastConvolution
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness

SEED = 0


@dataclass(frozen=True)
class Task:
    """Federated training with SGD and one local epoch.

    Attributes:
        net: the name of a network in `fedhb.nets`.
        shape: of an example.
        num_clients, examples: N, and how many examples each has.
        per_round: N_f, clients in a round.
        batch_size, lr, momentum: of the clients' SGD.
        batch_norm: by running statistics, or by those of the batch.
        num_classes: labels and inputs are random; the cost of a round does not depend on them.
        options: the network's own.
    """

    net: str
    shape: tuple[int, ...]
    num_clients: int
    examples: int
    per_round: int
    batch_size: int = 50
    lr: float = 0.1
    momentum: float = 0.0
    batch_norm: str = "running"
    num_classes: int = 10
    options: Mapping[str, float] = field(default_factory=dict, hash=False)

    def model(self) -> nn.Module:
        """Return the network that all contenders begin with."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return nets.build(self.net, self.shape, self.num_classes, **self.options)

    def ordinary(self) -> nn.Module:
        """Return this network with torch's own convolutions, as others would write it."""
        model = self.model()
        for module in model.modules():
            if isinstance(module, FastConvolution):
                module.__class__ = nn.Conv2d  # type: ignore[assignment]
        if self.batch_norm == "batch":
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.track_running_stats = False
                    module.running_mean = module.running_var = module.num_batches_tracked = None
        return model

    def examples_of(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [n, ...] (float32, uniform in -1..1) and labels [n] of one client."""
        rng = np.random.default_rng([SEED, client])
        x = rng.random((self.examples, *self.shape), dtype=np.float32) * 2 - 1
        return x, rng.integers(0, self.num_classes, self.examples)

    def clients(self) -> Clients:
        """Return all clients, as fedhb holds them."""
        return Clients.from_arrays(
            [self.examples_of(k) for k in range(self.num_clients)], num_classes=self.num_classes
        )

    def problem(self, clients: Clients) -> Problem:
        """Return the problem, as fedhb states it."""
        network = Network(self.model(), batch_norm=self.batch_norm, scaling=clients.scaling)
        return Problem(
            network,
            Categorical(self.num_classes),
            Federation(len(clients), clients.num_examples, self.num_classes),
        )

    def plan(self, update: str) -> Plan:
        """Return how a client trains."""
        return Plan(1, self.batch_size, self.lr, self.momentum, train_head=update == "full")

    @property
    def fraction(self) -> float:
        """The share of the clients in a round, f."""
        return self.per_round / self.num_clients

    def cohort(self, round_number: int) -> list[int]:
        """Return the clients of a round: those that fedhb's engine draws."""
        return cohort(self.num_clients, self.fraction, Randomness(SEED, round_number))

    def order(self, round_number: int, client: int) -> Tensor:
        """Return the order of a client's examples in a round, as fedhb's engine shuffles them."""
        return torch.randperm(
            self.examples, generator=Randomness(SEED, round_number)(client, "order")
        )
