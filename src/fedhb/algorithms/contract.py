"""The contract of an algorithm: what the engines call, and the few things that every algorithm shares.

An algorithm is a frozen dataclass. Its fields are its hyper-parameters, its methods the steps of its pseudocode. It knows
nothing of engines, files, devices or logging. All state is arrays: what the server keeps, what is sent down, what a client
finds and remembers, and the sums that the server solves from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedhb.clients.clients import Clients
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Federation:
    """What the server knows of its clients.

    Attributes:
        num_clients: N.
        num_examples: |D|, the training examples of all clients together.
        num_classes: the number of classes, None for regression.
        server_inputs: unlabelled inputs that the server holds, or None.
    """

    num_clients: int
    num_examples: int
    num_classes: int | None = None
    server_inputs: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A network, a likelihood and a federation: what every step of an algorithm is given."""

    network: Network
    likelihood: Likelihood
    federation: Federation


class Algorithm(Protocol):
    """The steps. C clients are a leading axis wherever clients appear."""

    name: ClassVar[str]
    pools: ClassVar[bool]
    """Whether the cohort is one client: its data are pooled (centralised training)."""
    sends: ClassVar[bool]
    """Whether anything travels between server and clients; where not, what they exchange is not counted as sent."""
    gathers: ClassVar[bool]
    """Whether it needs the clients' individual answers, O(N_f d), where others need their sums (defence.py)."""
    each: ClassVar[tuple[str, ...]]
    """The keys of `broadcast` that differ between clients and so have a leading client axis [C, ...]."""
    private: ClassVar[bool]
    """Whether its sums may be clipped and noised (privacy.py): averages of differences, and nothing else; not inherited."""
    training: ClassVar[Mapping[str, float]]
    """Values of lr, momentum, personal_lr and personal_epochs that a run takes where it is given none; not inherited."""

    @property
    def update(self) -> str:
        """What is trained: body, or full (body and head)."""
        ...

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """L_0 before the first round: the server's state."""
        ...

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """What the server sends down to these clients."""
        ...

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """The memory [C, ...] of clients that never took part."""
        ...

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Alg. step 3: what C clients found, [C, ...], and what they remember."""
        ...

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """Additive statistics of what C clients found; those of several chunks are added in float64."""
        ...

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Alg. step 5: the server's new state, from sums over the round's clients."""
        ...

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """What a round records beside loss and score, from the sums and the state that the clients received."""
        ...

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Global prediction for inputs x [n, ...]."""
        ...

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """v(theta) for C clients, from their own data."""
        ...


@dataclass(frozen=True)
class Personalised:
    """The personal posteriors of C clients, each a weighted set of M networks.

    Attributes:
        problem: the network and likelihood to predict with.
        theta: [C, M, d].
        head: [C, M, h].
        buffers: [C, M, b].
        weights: [C, M], each row summing to one.
    """

    problem: Problem
    theta: Tensor
    head: Tensor
    buffers: Tensor
    weights: Tensor

    @classmethod
    def point(cls, problem: Problem, weights: Weights) -> Personalised:
        """One network per client."""
        ones = torch.ones_like(weights.theta[:, :1])
        return cls(
            problem,
            weights.theta.unsqueeze(1),
            weights.head.unsqueeze(1),
            weights.buffers.unsqueeze(1),
            ones,
        )

    def client(self, c: int) -> Personalised:
        """The posterior of one of the clients."""
        rows = slice(c, c + 1)
        return Personalised(
            self.problem, self.theta[rows], self.head[rows], self.buffers[rows], self.weights[rows]
        )

    def predict(self, x: Tensor) -> Tensor:
        """Predictions [C, n, ...] for inputs x [C, n, ...]."""
        each = []
        for j in range(self.theta.shape[1]):
            weights = Weights(self.theta[:, j], self.head[:, j], self.buffers[:, j])
            each.append(
                self.problem.likelihood.predictive(self.problem.network.outputs(weights, x))
            )
        shares = self.weights.T.unsqueeze(-1).expand(-1, *x.shape[:2])  # [M, C, n]
        return self.problem.likelihood.average(torch.stack(each), shares)

    def arrays(self) -> Arrays:
        """What a file keeps of it."""
        return {
            "theta": self.theta,
            "head": self.head,
            "buffers": self.buffers,
            "weights": self.weights,
        }


@dataclass(frozen=True)
class Stateless:
    """Algorithms whose clients remember nothing."""

    name: ClassVar[str] = ""
    pools: ClassVar[bool] = False
    sends: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    each: ClassVar[tuple[str, ...]] = ()
    private: ClassVar[bool] = False
    training: ClassVar[Mapping[str, float]] = {}
    update: str = setting(
        "body", "what is trained: body, or full (body and head)", choices=("body", "full")
    )

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Nothing."""
        return {}

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Nothing more."""
        return {}
