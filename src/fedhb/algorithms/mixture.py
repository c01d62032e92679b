"""The Mixture model (Alg. 7 to 9 of the paper): K prototypes, and a gate that says which of them an input belongs to.

    p(phi) = prod_j N(mu_j; 0, I),   p(theta_i | phi) = 1/K sum_j N(theta_i; mu_j, sigma2 I)                eq:mix_prior
    q(phi) = prod_j N(mu_j; r_j, eps^2 I),   q_i(theta_i) = N(theta_i; m_i, eps^2 I)                        eq:mix_vi_q

Clients minimise -log p(D_i | m_i) - log sum_j exp(-||m_i - r_j||^2 / (2 sigma2))                           eq:mix_client_opt2
and train the gate g(x; beta) on their inputs with the label j* = argmin_j ||m_i - r_j||.
The server takes one EM step on its objective (eq:mix_server):

    E: c(j|i) = softmax_j(-||m_i - r_j||^2 / (2 sigma2))
    M: r_j = mean_i c(j|i) m_i / (sigma2 / N + mean_i c(j|i))

and averages beta. Global prediction: sum_j g_j(x) p(y | x, r_j). eps is so small that q_i and q(phi) are taken at their means.
Sent: (K+1)d down (r, beta), 2d up (m_i, beta_i); with one prototype there is no gate: d and d.

A prototype that no client of a round is near to keeps its place (the formula would move it to zero in one step); after
`patience` rounds alone it starts again beside the most used one. `idle` [K] counts those rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.hierarchical import Hierarchical
from fedhb.algorithms.prototypes import Nearness, by_prototype
from fedhb.algorithms.toolbox import (
    average_shared,
    differences,
    mixture_prediction,
    repeat,
    shared_parts,
    start_weights,
    step,
    summarise_shared,
)
from fedhb.clients.clients import Clients
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull
from fedhb.training.sgd import Sgd

SAMPLE = 100  # examples by which a client finds the prototype to begin at
ALIVE = 1e-6  # the mean responsibility that makes a prototype alive in a round


@dataclass(frozen=True)
class Mixture(Hierarchical):
    """K prototypes with a gate."""

    name: ClassVar[str] = "mixture"
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
    begin: str = setting(
        "global",
        "where clients begin: global (the centre), last, or nearest (prototype)",
        choices=("global", "last", "nearest"),
    )
    num_prototypes: int = setting(2, "K", positive=True)
    sigma2: float = setting(
        1.0, "variance of a client's weights around its prototype", positive=True
    )
    noise: float = setting(
        1e-3, "prototypes begin at the initial network plus noise of this deviation", least=0.0
    )
    patience: int = setting(
        30, "rounds without clients after which a prototype starts again", least=0
    )
    shrink: bool = setting(
        False, "the prior N(0, I) on prototypes, sigma2 / N in the M-step, as printed"
    )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Prototypes at one network plus small noise (equal ones would stay equal, far ones would die); gate = the body."""
        theta, K = problem.network.theta, self.num_prototypes
        noise = torch.randn(
            K, len(theta), generator=rng(SERVER, "prototypes"), dtype=torch.float32
        ).to(theta)
        server = {
            "r": theta + (self.noise if K > 1 else 0.0) * noise,
            "idle": torch.zeros(K, dtype=torch.int64),
        }
        shared = shared_parts(problem, self.update, shortens=self.shrink)
        if "buffers" in shared:
            server["buffers"] = repeat(shared.pop("buffers"), K)
        if K > 1:
            server["beta"] = theta.clone()
            if len(problem.network.buffers):
                server["beta_buffers"] = problem.network.buffers.clone()
        return server | shared

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """All but the count of idle rounds."""
        return {key: value for key, value in server.items() if key != "idle"}

    def centre(self, received: Arrays) -> Tensor:
        """The mean of the prototypes."""
        return received["r"].mean(0)

    def common(self, received: Arrays) -> Arrays:
        """A client begins with the mean of the prototypes' buffers."""
        return received | (
            {"buffers": received["buffers"].mean(0)} if "buffers" in received else {}
        )

    def beginning(self, problem: Problem, received: Arrays, clients: Clients) -> Weights:
        """The centre, or (begin="nearest") the prototype under which a sample of the client's own data is likeliest."""
        start = super().beginning(problem, received, clients)
        if self.begin == "nearest" and len(received["r"]) > 1:
            for c, j in enumerate(self.likeliest(problem, received, clients)):
                start.theta[c] = received["r"][j]
                if "buffers" in received:
                    start.buffers[c] = received["buffers"][j]
        return start

    def likeliest(self, problem: Problem, received: Arrays, clients: Clients) -> list[int]:
        """argmax_j log p(sample of D_i | r_j) for each client; the sample has at most SAMPLE examples."""
        prototypes = self.prototypes(problem, received)
        best = []
        for c in range(len(clients)):
            x, y = clients.train.examples(c, SAMPLE)
            outputs = problem.network.outputs(prototypes, x.expand(len(prototypes.theta), *x.shape))
            loss = problem.likelihood.loss(outputs, y.expand(len(outputs), *y.shape))
            best.append(int(loss.sum(1).argmin()))
        return best

    def prototypes(self, problem: Problem, server: Arrays) -> Weights:
        """The K prototypes as networks, each with its own buffers."""
        weights = start_weights(problem, server["r"][0], self.common(server), len(server["r"]))
        weights.theta = server["r"]
        weights.buffers = server.get("buffers", weights.buffers)
        return weights

    def pull(
        self, problem: Problem, received: Arrays, sizes: Tensor, near: Nearness | None = None
    ) -> Pull:
        """mu = kl_weight / (sigma2 |D_i|), towards sum_j c(j|m) r_j with c at the current m: Jensen's bound, as in EM."""
        r = received["r"]
        sizes = (
            sizes[:1] if (sizes == sizes[0]).all() else sizes
        )  # equal clients share one strength
        mu = (self.kl_weight / (self.sigma2 * sizes.to(r.dtype))).unsqueeze(1)
        return (
            Pull(mu, r[0])
            if len(r) == 1
            else Pull(mu, r, (near or Nearness(r, self.sigma2)).responsibilities)
        )

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """-log 1/K sum_j exp(-||m_i - r_j||^2 / (2 sigma2)), which is never negative."""
        return distributions.mixture_penalty(m, received["r"], self.sigma2) + math.log(
            len(received["r"])
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
        """Alg. 7, step 3: m_i by proximal SGD, and beta_i by SGD on (x, j*) with the same minibatches."""
        K = len(received["r"])
        if K == 1:
            return super().local_update(problem, received, clients, memory, plan, rng)
        near = Nearness(received["r"], self.sigma2)
        gate = Sgd(
            problem.network.gate(K),
            gate_weights(problem, received, len(clients)),
            replace(plan, train_head=False),
        )

        def train_gate(batch: Batch, m: Tensor) -> None:
            j_star = near.scores(m).argmax(1)  # [A]
            gate.step(batch, Categorical(K), y=j_star.unsqueeze(1).expand(batch.y.shape[:2]))

        # the next step's pull asks how near m is where the gate has asked: one answer serves both
        pull = (
            self.pull(problem, received, clients.sizes.to(problem.network.device), near)
            if self.kl_weight > 0
            else None
        )
        weights, reports = self.fit(
            problem, received, clients, memory, plan, rng, pull, beside=train_gate
        )
        found = self.found(weights, received, reports) | {"beta": gate.weights.theta}
        if "beta_buffers" in received:
            found["beta_buffers"] = gate.weights.buffers
        return found, self.recall(weights, memory)

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """E-step: sum_i c(j|i) and sum_i c(j|i) (m_i - r_j); sums of beta_i, and of the buffers under c."""
        m, r = found["m"], received["r"]
        c = distributions.responsibilities(m, r, self.sigma2).double()  # [C, K]
        ones = torch.ones_like(found["examples"])
        shared = {k: v for k, v in received.items() if k != "buffers"}
        sums = {"c": c.sum(0), "r": by_prototype(m, r, c), **summarise_shared(found, shared, ones)}
        if "buffers" in received:
            sums["prototype_buffers"] = by_prototype(found["buffers"], received["buffers"], c)
        for key in ("beta", "beta_buffers"):
            if key in received:
                sums[key] = differences(found[key], received[key], ones)
        return sums

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """M-step on the prototypes that have clients; dead ones wait, then start again beside the most used one."""
        count, mass = summary["count"], summary["c"].unsqueeze(1)
        alive = summary["c"] / count >= ALIVE
        mean = server["r"].double() + summary["r"] / mass.clamp_min(ALIVE)
        # r_j = sum_i c m_i / (sigma2 N_f / N + sum_i c), with sum_i c m_i = mass * mean
        extra = self.sigma2 * count / problem.federation.num_clients if self.shrink else 0.0
        r = torch.where(alive.unsqueeze(1), mass / (mass + extra) * mean, server["r"].double())
        idle = torch.where(alive, 0, server["idle"] + 1)
        respawn = idle > self.patience
        if respawn.any():
            noise = torch.randn(
                server["r"].shape, generator=rng(SERVER, "respawn"), dtype=torch.float32
            ).to(r)
            r = torch.where(respawn.unsqueeze(1), r[summary["c"].argmax()] + self.noise * noise, r)
            idle = torch.where(respawn, 0, idle)
        new = {"r": r.to(server["r"].dtype), "idle": idle, **average_shared(server, summary)}
        if "prototype_buffers" in summary:
            step_by_prototype = torch.where(
                alive.unsqueeze(1), summary["prototype_buffers"] / mass.clamp_min(ALIVE), 0.0
            )
            buffers = step(server["buffers"], step_by_prototype)
            new["buffers"] = torch.where(
                respawn.unsqueeze(1), buffers[summary["c"].argmax()], buffers
            )
        for key in ("beta", "beta_buffers"):
            if key in summary:
                new[key] = step(server[key], summary[key] / count)
        return new

    def repair(self, summary: Arrays, deviation: float) -> Arrays:
        """Under noise of this deviation (privacy.py), a prototype whose mass does not stand out of it has no clients."""
        return summary | {"c": torch.where(summary["c"] > 2.0 * deviation, summary["c"], 0.0)}

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Alg. 8: sum_j g_j(x) p(y | x, r_j), mixed as probabilities."""
        return mixture_prediction(
            problem, self.prototypes(problem, server), self.gate(problem, server, x), x
        )

    def gate(self, problem: Problem, server: Arrays, x: Tensor) -> Tensor:
        """g_j(x), [K, n]."""
        K = len(server["r"])
        if K == 1:
            return torch.ones(1, len(x), dtype=problem.network.dtype, device=problem.network.device)
        weights = gate_weights(problem, server, 1)
        return problem.network.gate(K).outputs(weights, x.unsqueeze(0))[0].softmax(-1).T

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """theta ~ 1/K sum_j N(r_j, (sigma2 + eps^2) I): the prior predictive, which the gate replaces in prediction."""
        j = torch.randint(len(server["r"]), (count,), generator=generator)
        noise = torch.randn(count, problem.network.num_params, generator=generator)
        return server["r"][j] + self.sigma2**0.5 * noise.to(server["r"])

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """1/2 sum_j ||r_j||^2, or nothing under a flat prior on the prototypes."""
        return (
            0.5 * server["r"].double().square().sum()
            if self.shrink
            else torch.zeros((), dtype=torch.float64)
        )

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """log 1/K sum_j exp(-||m_i - r_j||^2 / (2 sigma2))."""
        return -self.kl(problem, server, m)

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """The objective, mean responsibilities, and the effective number of prototypes exp(entropy)."""
        share = summary["c"] / summary["c"].sum()
        entropy = -(share * share.clamp_min(1e-300).log()).sum()
        own = {"responsibilities": share.tolist(), "effective_prototypes": entropy.exp().item()}
        return super().report(problem, server, summary) | own


def gate_weights(problem: Problem, received: Arrays, count: int) -> Weights:
    """The gate's weights for `count` clients: beta under the gate's fixed random head."""
    network = problem.network.gate(len(received["r"]))
    buffers = received.get("beta_buffers", network.buffers)
    return Weights(
        repeat(received["beta"], count), repeat(network.head, count), repeat(buffers, count)
    )
