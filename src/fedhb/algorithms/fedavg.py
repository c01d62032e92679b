"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017).

    each round, the server sends theta to the clients i in the cohort
        theta_i <- tau epochs of SGD on D_i from theta
    theta <- sum_i |D_i| theta_i / sum_i |D_i|

Global prediction: the averaged network. Personalisation: fine-tuning of body and head on the
client's own data. Sent: d down, d up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import (
    AlgorithmBase,
    Arrays,
    Kind,
    Personalised,
    Problem,
    Release,
    Vector,
)
from fedhb.algorithms.toolbox import (
    SHARED_ANSWERS,
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
from fedhb.training.proximal import NO_PENALTY, Penalty, Pull
from fedhb.training.sgd import train


@dataclass(frozen=True)
class Averaging(AlgorithmBase):
    """A server whose theta is the weighted mean of its clients' theta_i."""

    answer: ClassVar[Mapping[str, Kind]] = {"theta": Vector("theta"), **SHARED_ANSWERS}

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return the initial network."""
        return {"theta": problem.network.theta.clone(), **shared_parts(problem, self.update)}

    def weight(self, answers: Arrays) -> Tensor:
        """Return w_i [C]: the clients' numbers of examples."""
        return answers["examples"]

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return sum_i w_i (theta_i - theta) and sum_i w_i."""
        weight = self.weight(answers)
        theta = differences(answers["theta"], received["theta"], weight)
        return {"theta": theta, **summarise_shared(answers, received, weight)}

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return theta + sum_i w_i (theta_i - theta) / sum_i w_i."""
        theta = step(server["theta"], summary["theta"] / summary["weight"])
        return {"theta": theta, **average_shared(server, summary)}


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Federated averaging."""

    name: ClassVar[str] = "fedavg"
    release: ClassVar[Release | None] = Release()
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    weighted: bool = setting(True, "average by the clients' number of examples, else equally")

    def weight(self, answers: Arrays) -> Tensor:
        """Return the clients' numbers of examples, or ones."""
        return answers["examples"] if self.weighted else torch.ones_like(answers["examples"])

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return theta_i, with the head and buffers that are shared."""
        weights, reports = self.train(problem, received, clients, plan, rng)
        return {key: getattr(weights, key) for key in received} | reports, memory

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the prediction of the averaged network."""
        return averaged_prediction(problem, server, x)

    def pull(self, problem: Problem, received: Arrays, key: str) -> Pull | None:
        """Return the penalty on theta or on the head (`key`): none."""
        return None

    def train(
        self, problem: Problem, received: Arrays, clients: Clients, plan: Plan, rng: Randomness
    ) -> tuple[Weights, Arrays]:
        """Take tau epochs of SGD from what was received, under the penalties."""
        pull, head_pull = (self.pull(problem, received, key) for key in ("theta", "head"))
        return descend(problem, received, clients, plan, rng, Penalty(pull, head_pull))

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Fine-tune: the clients' training with the head trained too."""
        received = self.broadcast(server, clients.ids.tolist())
        weights, _ = self.train(problem, received, clients, plan, rng)
        return Personalised.point(problem, weights)


def averaged_prediction(problem: Problem, server: Arrays, x: Tensor) -> Tensor:
    """Return the prediction of the server's one network."""
    weights = start_weights(problem, server["theta"], server, 1)
    return mixture_prediction(problem, weights, uniform(1, x, problem.network.dtype), x)


def descend(
    problem: Problem,
    received: Arrays,
    clients: Clients,
    plan: Plan,
    rng: Randomness,
    penalty: Penalty = NO_PENALTY,
) -> tuple[Weights, Arrays]:
    """Take tau epochs of SGD from what was received, with penalties on body and head."""
    start = start_weights(problem, received["theta"], received, len(clients))
    return train(problem.network, problem.likelihood, start, clients, plan, rng, penalty)
