"""pFedBayes (Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022).

    each round, the server sends w = N(mu, sigma^2), sigma = softplus(rho), to the clients i in the cohort
        q_i = N(mu_i, sigma_i^2) <- w, moved by what q_i and w of client i differed by at the end of its last round, in mu and rho
        for every minibatch of tau epochs, with theta = mu_i + sigma_i noise, noise ~ N(0, I):
            step of q_i on E[mean loss at theta] + zeta KL(q_i || w) / |D_i|
            step of w   on zeta KL(q_i || w) / |D_i|
    (mu, rho) <- sum_i |D_i| (mu, rho of client i's w) / sum_i |D_i|

Per coordinate, KL(q || w) = log(sigma_w / sigma_q) + (sigma_q^2 + (mu_q - mu_w)^2) / (2 sigma_w^2) - 1/2.
Global prediction: networks sampled from w. Personal: from q_i, after the same update with the head trained too; a head that
was not sent has no prior and is pulled nowhere. Clients remember q_i - w. Sent: 2d down (mu, rho), 2d up.

The steps are SGD with momentum. What holds the means together, k = zeta / (|D_i| sigma_w^2), is stiff where |D_i| is small, so it
acts implicitly (as in proximal.py), and in this order: the loss moves mu_i, w's mean follows, mu_i is pulled back:

    mu_i' = mu_i - lr v,   mu_w+ = (mu_w' + lr k mu_i') / (1 + lr k),   mu_i+ = (mu_i' + lr k mu_w+) / (1 + lr k)

For large zeta q_i and w are one and train as FedAvg does; for zeta = 0, q_i is tuned alone and w stays. Were q_i pulled first,
w would go lr k / (1 + lr k)^2 of a step of SGD, nothing for large k. Clients remember q_i - w, not q_i, because w has moved on
since their last round, and an old q_i would pull it back. In rho the KL is not stiff; there q_i's step is first.

Against the public code (unofficial): noise N(0, 1), not N(0, 0.001^2); the KL divided by |D_i|, as in the paper, not by the
number of local steps; SGD, not Adam, whose steps do not depend on k and whose moments outlive the weights; one step of q_i for
each of w, not 5; q_i - w remembered, not q_i; rho0 -6, not -3: real noise must be below the weights' own scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import AlgorithmBase, Arrays, Kind, Personalised, Problem, Vector
from fedhb.algorithms.pairs import Pair, spread
from fedhb.algorithms.toolbox import (
    SHARED,
    SHARED_ANSWERS,
    average_shared,
    differences,
    mixture_prediction,
    repeat,
    shared_parts,
    start_weights,
    step,
    summarise_shared,
    uniform,
)
from fedhb.clients.clients import Clients
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd

NAMES = {"theta": ("mu", "rho"), "head": ("head", "head_rho")}
"""What mean and rho of the body and of the head are called in what is sent and remembered."""


@dataclass(frozen=True)
class PFedBayes(AlgorithmBase):
    """Personal mean-field Gaussians around a global one."""

    name: ClassVar[str] = "pfedbayes"
    answer: ClassVar[Mapping[str, Kind]] = {
        **{key: Vector(key) for pair in NAMES.values() for key in pair},
        **SHARED_ANSWERS,
    }
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    zeta: float = setting(
        10.0, "weight of KL(q_i || w); 1 is the paper's ELBO, large FedAvg, 0 no w", least=0.0
    )
    rho0: float = setting(
        -6.0,
        "rho before round 1: weights deviate by softplus(rho), 0.0025 for -6",
        least=-30.0,
        most=5.0,
    )
    num_samples: int = setting(
        1, "networks sampled for a prediction; 0 predicts at the mean", least=0
    )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """w around the initial network."""
        shared = shared_parts(problem, self.update)
        server = {
            "mu": problem.network.theta.clone(),
            "rho": torch.full_like(problem.network.theta, self.rho0),
            **shared,
        }
        return server | (
            {"head_rho": torch.full_like(shared["head"], self.rho0)} if "head" in shared else {}
        )

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """w."""
        return server

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """q_i - w, nothing before a client's first round."""
        initial = {
            key: value
            for key, value in self.start(problem, Randomness(0)).items()
            if key != "buffers"
        }
        return {
            key: repeat(torch.zeros_like(value), len(clients)) for key, value in initial.items()
        }

    def fit(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[dict[str, Pair], Tensor, Arrays]:
        """tau epochs of alternating steps on q_i and w: the pairs for body and head, the buffers, the reports."""
        sample = start_weights(problem, received["mu"], received, len(clients))
        solver = Sgd(problem.network, sample, plan)
        pairs = {
            key: self.pair(problem, received, clients, memory, plan, key)
            for key in NAMES
            if key == "theta" or solver.train_head
        }
        everyone, generators = (
            torch.arange(len(clients)),
            [rng(i, "weights") for i in clients.ids.tolist()],
        )
        for batch in batches(clients, plan, rng, merge_single=problem.network.has_batch_norm):
            own = [generators[c] for c in everyone[batch.active].tolist()]
            for key, pair in pairs.items():
                getattr(sample, key)[batch.active] = pair.draw(batch.active, own)
            for pair, gradient in zip(
                pairs.values(), solver.gradients(batch, problem.likelihood), strict=False
            ):
                assert gradient is not None
                pair.step(batch.active, gradient)
        kl = sum(pair.kl() for key, pair in pairs.items() if NAMES[key][0] in received)
        return (
            pairs,
            sample.buffers,
            solver.report() | {"examples": clients.sizes.double(), "kl": torch.as_tensor(kl)},
        )

    def pair(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        key: str,
    ) -> Pair:
        """q_i and w of the body or the head where they begin; a head that was not sent has no KL term."""
        mean, rho = NAMES[key]
        first = received.get(mean, getattr(problem.network, key))
        w = [
            repeat(v, len(clients))
            for v in (first, received.get(rho, torch.full_like(first, self.rho0)))
        ]
        q = [
            begin + memory[name] if name in memory else begin
            for name, begin in zip((mean, rho), w, strict=True)
        ]
        strength = (self.zeta if mean in received else 0.0) / clients.sizes.to(first).unsqueeze(1)
        return Pair(torch.stack([*q, *w]), strength, plan)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """The clients' w are sent; how their q_i differ from it stays with them."""
        pairs, buffers, reports = self.fit(problem, received, clients, memory, plan, rng)
        q, w = (
            {NAMES[key][j]: pair.values[k + j] for key, pair in pairs.items() for j in (0, 1)}
            for k in (0, 2)
        )
        found = {key: (w | {"buffers": buffers})[key] for key in received}
        return found | reports, {key: q[key] - w[key] for key in memory}

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """sum_i |D_i| (mu_i - mu), the same for rho, and sum_i |D_i|."""
        weight = found["examples"]
        own = {
            key: differences(found[key], received[key], weight)
            for key in received
            if key not in SHARED
        }
        return own | summarise_shared(found, received, weight)

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """The mean of the clients' (mu, rho) by size."""
        own = {
            key: step(value, summary[key] / summary["weight"])
            for key, value in server.items()
            if key not in SHARED
        }
        return own | average_shared(server, summary)

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """The mean KL(q_i || w)."""
        return {"kl": summary["kl"].item() / summary["count"].item()}

    def sample(self, mean: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
        """S draws of N(mean, softplus(rho)^2) for mean, rho [k], or the mean alone: [S or 1, k]."""
        noise = torch.randn(
            self.num_samples, len(mean), generator=generator, dtype=torch.float32
        ).to(mean)
        return mean + spread(rho)[0] * noise if self.num_samples else mean.unsqueeze(0)

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """The mean prediction of networks sampled from w."""
        generator = rng(SERVER, "predict")
        theta = self.sample(server["mu"], server["rho"], generator)
        weights = start_weights(problem, server["mu"], server, len(theta))
        weights.theta = theta
        if "head" in server:
            weights.head = self.sample(server["head"], server["head_rho"], generator)
        return mixture_prediction(
            problem, weights, uniform(len(theta), x, problem.network.dtype), x
        )

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """The client update with the head trained too, and networks sampled from q_i."""
        received = self.broadcast(server, clients.ids.tolist())
        pairs, buffers, _ = self.fit(problem, received, clients, memory, plan, rng)
        generators = [rng(i, "predict") for i in clients.ids.tolist()]
        drawn = {
            key: torch.stack(
                [
                    self.sample(pair.values[0, c], pair.values[1, c], g)
                    for c, g in enumerate(generators)
                ]
            )
            for key, pair in pairs.items()
        }
        theta = drawn["theta"]  # [C, S, d]
        count = theta.shape[1]
        fixed = (
            start_weights(problem, received["mu"], received, len(clients))
            .head.unsqueeze(1)
            .expand(-1, count, -1)
        )
        shares = torch.full(theta.shape[:2], 1.0 / count, dtype=theta.dtype, device=theta.device)
        return Personalised(
            problem,
            theta,
            drawn.get("head", fixed),
            buffers.unsqueeze(1).expand(-1, count, -1),
            shares,
        )
