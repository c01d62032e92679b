"""The ensembles that the paper compares its mixture with (sec:ens_baseline).

They are FedAvg, or FedBABU, with K networks.

    the clients are divided into K groups of equal size; j(i) is the group of client i
    each round, the server sends theta_j(i) to the clients i in the cohort
        theta_i <- tau epochs of SGD on D_i from theta_j(i)
    theta_j <- sum |D_i| theta_i / sum |D_i| over the cohort's clients of group j;
               without any, theta_j stays

mode="preset": a client uses its group's network, for prediction and for fine-tuning. Where no
client is named, all K predict.
mode="ensemble": all K networks predict, and personalisation fine-tunes all K; their probabilities
are averaged.
K = 1 is FedAvg. Sent: d down, d up.

A client's group follows from its id alone, so new clients have one too. Every K consecutive ids are
in K different groups, in an order drawn for these K, because ids may follow a pattern in the data
(the paper says no more than "equal proportions"). The paper does not say how the K networks begin:
here they begin as different ones (several_networks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.several_networks import PARTS, different_starts, learner_of, side_by_side
from fedhb.algorithms.toolbox import (
    differences,
    mixture_prediction,
    start_weights,
    step,
    summarise_shared,
    uniform,
)
from fedhb.clients.clients import Clients
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan


@dataclass(frozen=True)
class Ensemble(FedAvg):
    """K networks, each trained by its own group of clients."""

    name: ClassVar[str] = "ensemble"
    each: ClassVar[tuple[str, ...]] = (*PARTS, "group")
    known: ClassVar[tuple[str, ...]] = ("group",)
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.1,
        "momentum": 0.5,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    num_models: int = setting(2, "K, the networks and groups of clients", positive=True)
    mode: str = setting(
        "preset",
        "who predicts and is fine-tuned: the client's group's network, or all: preset or ensemble",
        choices=("preset", "ensemble"),
    )
    noise: float = setting(
        0.01,
        "networks begin at the initial network plus noise of this deviation; 0: as different "
        "networks",
        least=0.0,
    )

    def groups(self, ids: Sequence[int]) -> Tensor:
        """Return j(i) for clients with these ids [C]."""
        K, drawn = self.num_models, Randomness(0)
        orders = [torch.randperm(K, generator=drawn(i // K, "groups")) for i in ids]
        return torch.tensor([int(order[i % K]) for order, i in zip(orders, ids, strict=True)])

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return K different networks."""
        return different_starts(problem, self.num_models, self.update, self.noise, rng)

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send each client its group's network.

        The group itself need not be sent: the server knows which clients answer.
        """
        group = self.groups(ids)
        networks = {key: value[group.to(value.device)] for key, value in server.items()}
        return networks | {"group": group}

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember the group, for prediction; it follows from the id, and needs no keeping."""
        if self.mode != "preset":
            return {}
        return {"group": self.groups(clients.ids.tolist()).unsqueeze(1)}

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
        network = {key: value for key, value in received.items() if key != "group"}
        return super().local_update(problem, network, clients, {}, plan, rng)

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return sum_i w_i (theta_i - theta_j) [K, d] and sum_i w_i [K] of each group."""
        weight = self.weight(answers).double()
        sums = summarise_shared(answers, {}, weight)
        members = [(received["group"] == j).nonzero().flatten() for j in range(self.num_models)]
        sums["group_weight"] = torch.stack([weight[rows].sum() for rows in members])
        for key in PARTS:
            if key not in received:
                continue
            vectors = answers[key]
            shape = (self.num_models, vectors.shape[1])
            sums[key] = torch.zeros(shape, dtype=torch.float64, device=vectors.device)
            for total, rows in zip(sums[key], members, strict=True):
                if len(rows):
                    reference = received[key][rows[0]]
                    total.copy_(differences(vectors[rows], reference, weight[rows]))
        return sums

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return theta_j + sum_i w_i (theta_i - theta_j) / sum_i w_i; absent groups stay."""
        weight = summary["group_weight"]
        # the sums of an absent group are zero: it stays
        weight = torch.where(weight > 0, weight, 1.0).unsqueeze(1)
        return {
            key: step(server[key], summary[key] / weight.to(server[key].device)) for key in server
        }

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return each group's share of the round's weight."""
        return {"groups": (summary["group_weight"] / summary["weight"]).tolist()}

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the prediction of a client's network, by its memory [1, 1], or the mean of all."""
        networks = server  # [K, ...]
        if memory:
            networks = {key: value[memory["group"][0]] for key, value in server.items()}
        count = len(networks["theta"])
        weights = start_weights(problem, networks["theta"], networks, count)
        return mixture_prediction(problem, weights, uniform(count, x, problem.network.dtype), x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Fine-tune the group's network, or all K: the client update with the head trained too."""
        if self.mode == "preset":
            return super().personalise(problem, server, clients, memory, plan, rng)
        K = self.num_models
        networks = [learner_of(server, j) for j in range(K)]
        tuned = side_by_side(
            [self.train(problem, network, clients, plan, rng)[0] for network in networks]
        )
        shares = tuned.theta.new_full((len(clients), K), 1.0 / K)
        return Personalised(problem, tuned.theta, tuned.head, tuned.buffers, shares)
