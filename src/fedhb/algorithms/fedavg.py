"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

    each round, the server sends theta to the clients i in the cohort
        theta_i <- tau epochs of SGD on D_i from theta
    theta <- sum_i |D_i| theta_i / sum_i |D_i|

Global prediction: the averaged network. Personalisation: fine-tuning of body and head on the client's own data.
Sent: d down, d up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem, Stateless
from fedhb.algorithms.toolbox import (
    average_shared,
    differences,
    mixture_prediction,
    shared_parts,
    start_weights,
    step,
    summarise_shared,
    uniform,
)
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull
from fedhb.training.sgd import train


@dataclass(frozen=True)
class FedAvg(Stateless):
    """Federated averaging."""

    name: ClassVar[str] = "fedavg"
    private: ClassVar[bool] = True
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    update: str = setting(
        "full", "what is trained: body, or full (body and head)", choices=("body", "full")
    )
    weighted: bool = setting(True, "average by the clients' number of examples, else equally")

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """The initial network."""
        return {"theta": problem.network.theta.clone(), **shared_parts(problem, self.update)}

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """theta, and the head where it is trained."""
        return server

    def pull(self, problem: Problem, received: Arrays, key: str) -> Pull | None:
        """The penalty on theta or on the head: none."""
        return None

    def fit(
        self, problem: Problem, received: Arrays, clients: Clients, plan: Plan, rng: Randomness
    ) -> tuple[Weights, Arrays]:
        """tau epochs of SGD from what was received."""
        start = start_weights(problem, received["theta"], received, len(clients))
        pull, head_pull = (
            self.pull(problem, received, "theta"),
            self.pull(problem, received, "head"),
        )
        return train(
            problem.network,
            problem.likelihood,
            start,
            clients,
            plan,
            rng,
            pull=pull,
            head_pull=head_pull,
        )

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """theta_i, with the head and buffers that are shared."""
        weights, reports = self.fit(problem, received, clients, plan, rng)
        return {key: getattr(weights, key) for key in received} | reports, memory

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """sum_i w_i (theta_i - theta) and sum_i w_i."""
        weight = found["examples"] if self.weighted else torch.ones_like(found["examples"])
        return {
            "theta": differences(found["theta"], received["theta"], weight),
            **summarise_shared(found, received, weight),
        }

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """theta + sum_i w_i (theta_i - theta) / sum_i w_i."""
        return {
            "theta": step(server["theta"], summary["theta"] / summary["weight"]),
            **average_shared(server, summary),
        }

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """The prediction of the averaged network."""
        weights = start_weights(problem, server["theta"], server, 1)
        return mixture_prediction(problem, weights, uniform(1, x, problem.network.dtype), x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Fine-tuning: the client update with the head trained too."""
        weights, _ = self.fit(
            problem, self.broadcast(server, clients.ids.tolist()), clients, plan, rng
        )
        return Personalised.point(problem, weights)
