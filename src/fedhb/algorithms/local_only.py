"""Local training alone: no federation, every client has a model of its own.

    theta_i <- tau epochs of SGD on D_i from theta_i, whenever client i takes part

At first theta_i is the common initial network. Personalisation: the client's own model, trained on
with the head too; a client that never took part begins at the initial network.

Global prediction needs a rule, as there is no global model: the mean of the local models'
predictions. All N models would be N d numbers, so the server has M = `num_models` places. It holds
the models of the clients that own one:

    theta [M, d]   the owner's latest model
    owner [M]      its id, or SERVER where the place is free

A participant without a place draws a number below max(free places, clients without a place). The
first numbers are the free places. A client that alone drew one owns it from then on. So the owners
are a random sample of the clients that trained, in time all of them if N <= M. The server needs
sums only: the number of clients, their ids and their models, by place. For a place of one client
they are that client's own. Memory: O(M d) for the server's state and each of the sums, d on each
client.

Sent: nothing. Models reach the server for the sake of evaluation, which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import (
    AlgorithmBase,
    Arrays,
    ClientId,
    Kind,
    Personalised,
    Problem,
    Vector,
)
from fedhb.algorithms.toolbox import (
    SHARED,
    SHARED_ANSWERS,
    mixture_prediction,
    repeat,
    shared_parts,
    start_weights,
    summarise_shared,
    uniform,
)
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan
from fedhb.training.sgd import train

MODEL = ("theta", *SHARED)


@dataclass(frozen=True)
class LocalOnly(AlgorithmBase):
    """Each client trains a model of its own."""

    name: ClassVar[str] = "local"
    answer: ClassVar[Mapping[str, Kind]] = {
        "theta": Vector(),
        **SHARED_ANSWERS,
        "client": ClientId(),
    }
    sends: ClassVar[bool] = False
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.1,
        "momentum": 0.9,
        "personal_lr": 0.01,
        "personal_epochs": 5,
    }
    num_models: int = setting(
        50, "M, local models whose predictions the global one averages", positive=True
    )

    def initial(self, problem: Problem, count: int) -> Arrays:
        """Return the initial network `count` times: theta, the head if it is trained, buffers."""
        parts = {"theta": problem.network.theta, **shared_parts(problem, self.update)}
        return {key: repeat(value, count) for key, value in parts.items()}

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return M free places."""
        owner = torch.full(
            (self.num_models,), SERVER, dtype=torch.int64, device=problem.network.device
        )
        return self.initial(problem, self.num_models) | {"owner": owner}

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send no model, but the owners of the places, for `summarise`."""
        return {"owner": server["owner"]}

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember a client's model: the initial network before its first round."""
        return self.initial(problem, len(clients))

    def fit(
        self, problem: Problem, memory: Arrays, clients: Clients, plan: Plan, rng: Randomness
    ) -> tuple[Weights, Arrays]:
        """Take tau epochs of SGD from where the client stopped."""
        start = start_weights(problem, memory["theta"], memory, len(clients))
        return train(problem.network, problem.likelihood, start, clients, plan, rng)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return the clients' models, which they remember."""
        weights, reports = self.fit(problem, memory, clients, plan, rng)
        model = {key: getattr(weights, key) for key in memory}
        return model | reports | {"client": clients.ids.to(problem.network.device)}, model

    def places(
        self, problem: Problem, owner: Tensor, ids: Sequence[int], rng: Randomness
    ) -> Tensor:
        """Return 1 where a client owns a place or drew it, [C, M]."""
        free = (owner == SERVER).nonzero().flatten()
        held = {i: k for k, i in enumerate(owner.tolist()) if i != SERVER}
        numbers = max(len(free), problem.federation.num_clients - len(held))
        chosen = torch.zeros(len(ids), len(owner), dtype=torch.float64, device=owner.device)
        for row, i in zip(chosen, ids, strict=True):
            if i in held:
                row[held[i]] = 1.0
                continue
            number = int(torch.randint(numbers, (), generator=rng(i, "place")))
            if number < len(free):
                row[free[number]] = 1.0
        return chosen

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the number of clients, their ids and their models, by place."""
        ids = answers["client"]
        chosen = self.places(problem, received["owner"], ids.tolist(), rng)
        return {
            **{key: chosen.T @ answers[key].double() for key in MODEL if key in answers},
            "places": chosen.sum(0),
            "owner": chosen.T @ ids.double(),
            **summarise_shared(answers, {}, answers["examples"]),
        }

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Set the places that one client alone owns or drew to its model."""
        alone = summary["places"] == 1.0
        new = {"owner": torch.where(alone, summary["owner"].to(torch.int64), server["owner"])}
        for key in MODEL:
            if key in server:
                model = summary[key].to(server[key].dtype)
                new[key] = torch.where(alone.unsqueeze(1), model, server[key])
        return new

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the mean prediction of the models that the server holds.

        Where it holds none, it is that of the initial network.
        """
        held = (server["owner"] != SERVER).nonzero().flatten()
        rows = held if len(held) else torch.zeros_like(server["owner"][:1])
        models = {key: server[key][rows] for key in MODEL if key in server}
        weights = start_weights(problem, models["theta"], models, len(rows))
        return mixture_prediction(problem, weights, uniform(len(rows), x, problem.network.dtype), x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Train the client's own model on, with the head too."""
        weights, _ = self.fit(problem, memory, clients, plan, rng)
        return Personalised.point(problem, weights)
