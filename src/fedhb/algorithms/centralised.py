"""Centralised training (the last column of the paper's tab:cifar_more_k).

There is no federation: the examples lie in one place.

    each round, for the participants i in an order drawn anew                   shuffle="client"
        theta <- tau epochs of SGD on D_i from theta
    or                                                                          shuffle="pooled"
        theta <- tau epochs of SGD on all participants' examples, shuffled together

The momentum runs through the round. It starts at zero in every round, as in every algorithm.
Prediction: the network. Personalisation: fine-tuning of body and head, as FedAvg's. With one
participant both orders are FedAvg. Sent: no models. The participants' data would move instead,
which is not counted: zero bytes down and up.

There is no reference code. The paper says that the batches come from the participants of the
federated setting, and that training then fails where clients have few classes and tau is large. So
"client" stays with a client for its tau epochs (if clients took turns epoch by epoch, tau epochs
would be little else than tau rounds). It is biased towards the clients that come last, and towards
small clients, whose batches are smaller. "pooled" is the usual meaning of "centralised": SGD on all
the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem
from fedhb.algorithms.fedavg import Averaging, averaged_prediction, descend
from fedhb.algorithms.toolbox import start_weights
from fedhb.clients.clients import Clients
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd


@dataclass(frozen=True)
class Centralised(Averaging):
    """SGD on the participants' data.

    The cohort is one client, so the mean on the server is of one answer: the result as it is.
    """

    name: ClassVar[str] = "centralised"
    pools: ClassVar[bool] = True
    sends: ClassVar[bool] = False
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.5,
        "personal_lr": 0.01,
        "personal_epochs": 15,
    }
    shuffle: str = setting(
        "pooled",
        "a batch is of one client, clients in turn, or of all participants' examples: client or "
        "pooled",
        choices=("client", "pooled"),
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
        """Return one theta [1, d], trained on the examples of all participants."""
        solver = Sgd(problem.network, start_weights(problem, received["theta"], received, 1), plan)
        for part in self.turns(clients, rng):
            for batch in batches(part, plan, rng, merge_single=problem.network.has_batch_norm):
                solver.step(batch, problem.likelihood)
        answer = {key: getattr(solver.weights, key) for key in received} | solver.report()
        return answer | {"examples": clients.sizes.double().sum(0, keepdim=True)}, memory

    def turns(self, clients: Clients, rng: Randomness) -> list[Clients]:
        """Return the participants one by one in the round's order, or all as one client.

        The order of the given clients does not matter.
        """
        clients = clients.select(clients.ids.argsort().tolist())
        if self.shuffle == "pooled":
            # one client with everybody's rows, which draws its randomness as the first of them does
            share = replace(clients.train, offsets=clients.train.offsets[[0, -1]])
            pooled = Clients(
                ids=clients.ids[:1],
                train=share,
                num_classes=clients.num_classes,
                augment=clients.augment,
            )
            return [pooled]
        order = torch.randperm(len(clients), generator=rng(SERVER, "turns"))
        return [clients.select([k]) for k in order.tolist()]

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the prediction of the network."""
        return averaged_prediction(problem, server, x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Fine-tune body and head, as FedAvg does."""
        weights, _ = descend(problem, server, clients, plan, rng)
        return Personalised.point(problem, weights)
