"""The ensembles that the paper compares its mixture with (sec:ens_baseline): FedAvg, or FedBABU, with K networks.

    the clients are divided into K groups of equal size; j(i) is the group of client i
    each round, the server sends theta_j(i) to the clients i in the cohort
        theta_i <- tau epochs of SGD on D_i from theta_j(i)
    theta_j <- sum |D_i| theta_i / sum |D_i| over the cohort's clients of group j; without any, theta_j stays

mode="preset": a client uses its group's network, for prediction and for fine-tuning; where no client is named, all K predict.
mode="ensemble": all K networks predict, and personalisation fine-tunes all K; their probabilities are averaged.
K = 1 is FedAvg. Sent: d down, d up.

A client's group follows from its id alone, so new clients have one too: every K consecutive ids are in K different groups, in an
order drawn for these K, because ids may follow a pattern in the data (the paper says no more than "equal proportions"). The
paper does not say how the K networks begin: they begin as different ones (learners.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.several_networks import PARTS, different_starts, one, side_by_side
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
        "networks begin at the initial network plus noise of this deviation; 0: as different networks",
        least=0.0,
    )

    def groups(self, ids: Sequence[int]) -> Tensor:
        """j(i) for clients with these ids [C]."""
        K = self.num_models
        return torch.tensor(
            [int(torch.randperm(K, generator=Randomness(0)(i // K, "groups"))[i % K]) for i in ids]
        )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """K different networks."""
        return different_starts(problem, self.num_models, self.update, self.noise, rng)

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Each client's group's network. (The group itself need not be sent: the server knows who answers.)"""
        group = self.groups(ids)
        return {key: value[group.to(value.device)] for key, value in server.items()} | {
            "group": group
        }

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """The group, for prediction; it follows from the id, and needs no keeping."""
        return (
            {"group": self.groups(clients.ids.tolist()).unsqueeze(1)}
            if self.mode == "preset"
            else {}
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
        network = {key: value for key, value in received.items() if key != "group"}
        found, _ = super().local_update(problem, network, clients, {}, plan, rng)
        return found, {}

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """For each group, sum_i w_i (theta_i - theta_j) [K, d] and sum_i w_i [K]."""
        weight = self.weight(found).double()
        sums = summarise_shared(found, {}, weight)
        members = [(received["group"] == j).nonzero().flatten() for j in range(self.num_models)]
        sums["group_weight"] = torch.stack([weight[own].sum() for own in members])
        for key in PARTS:
            if key in received:
                sums[key] = torch.zeros(
                    self.num_models,
                    found[key].shape[1],
                    dtype=torch.float64,
                    device=found[key].device,
                )
                for total, own in zip(sums[key], members, strict=True):
                    if len(own):
                        total.copy_(
                            differences(found[key][own], received[key][own[0]], weight[own])
                        )
        return sums

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """theta_j + sum_i w_i (theta_i - theta_j) / sum_i w_i for the groups that took part."""
        weight = summary["group_weight"]
        weight = torch.where(weight > 0, weight, 1.0).unsqueeze(
            1
        )  # the sums of an absent group are zero: it stays
        return {
            key: step(server[key], summary[key] / weight.to(server[key].device)) for key in server
        }

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Each group's share of the round's weight."""
        return {"groups": (summary["group_weight"] / summary["weight"]).tolist()}

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """The prediction of the network of the client whose memory [1, 1] is given, or the mean of all K predictions."""
        mine = (
            {key: value[memory["group"][0]] for key, value in server.items()} if memory else server
        )  # [1 or K, ...]
        count = len(mine["theta"])
        networks = start_weights(problem, mine["theta"], mine, count)
        return mixture_prediction(problem, networks, uniform(count, x, problem.network.dtype), x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Fine-tuning of the group's network, or of all K: the client update with the head trained too."""
        if self.mode == "preset":
            return super().personalise(problem, server, clients, memory, plan, rng)
        K = self.num_models
        tuned = side_by_side(
            [self.train(problem, one(server, j), clients, plan, rng)[0] for j in range(K)]
        )
        shares = torch.full(
            (len(clients), K), 1.0 / K, dtype=tuned.theta.dtype, device=tuned.theta.device
        )
        return Personalised(problem, tuned.theta, tuned.head, tuned.buffers, shares)
