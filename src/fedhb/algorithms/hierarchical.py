"""The general framework (Alg. 1 to 3 of the paper): p(phi) prod_i p(theta_i | phi) p(D_i | theta_i), fitted block by block.

The posterior is approximated by q(phi; L_0) prod_i q_i(theta_i; L_i) and the negative ELBO (eq:elbo)

    L = sum_i ( E_{q_i}[-log p(D_i | theta_i)] + E_{q(phi)} KL(q_i || p(theta_i | phi)) ) + KL(q(phi) || p(phi))

is lowered over the clients' L_i with L_0 fixed (eq:elbo_1_indiv), then over L_0 with the L_i fixed (eq:elbo_2):

    L_i = E_{q_i}[-log p(D_i | theta_i)] + KL(q_i || p(theta_i | phi*)),       phi* the mode of q(phi)
    L_0 = KL(q(phi) || p(phi)) - (N / N_f) sum_{i in cohort} E[log p(theta_i | phi)]

A **family** is a subclass that says what p(theta | phi) and q(phi) are. All families here have clients q_i that are narrow around
m_i, so that L_i = m_i, and the expected loss is taken at (a dropout sample of) m_i. A family defines

    start, summarise, aggregate     L_0, the sums it needs, and their solution (Alg. 1, step 5)
    centre                          where clients begin
    pull                            the gradient of KL / |D_i| at m as mu (m - target): a quadratic bound that touches it at m
    kl, global_kl, expected_log_prior   the terms of the objectives, up to constants
    sample                          theta ~ int p(theta | phi) q(phi) dphi

and inherits the client update, global prediction (Alg. 2) and personalisation (Alg. 3). docs/adding_an_algorithm.md adds a third.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem, Stateless
from fedhb.algorithms.toolbox import mixture_prediction, repeat, start_weights, uniform
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.average import Iterates
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull
from fedhb.training.sgd import train


@dataclass(frozen=True)
class Hierarchical(Stateless, ABC):
    """Base of the hierarchical Bayesian algorithms. `kl_weight` tempers every KL term of the objective (1: the ELBO itself)."""

    kl_weight: float = setting(1.0, "multiplies the KL terms; 1 is the ELBO itself", least=0.0)
    begin: str = setting(
        "global",
        "clients begin at the global value, or at their own last iterate: global or last",
        choices=("global", "last"),
    )

    average: float = setting(
        0.0,
        "share of the last steps of a personalisation whose weights are averaged: 0 for none",
        least=0.0,
        most=1.0,
    )

    p_do = 1.0
    """Each column is kept with this probability in the clients' q_i; a family with dropout makes it a setting."""
    num_samples = 1
    """S, the networks sampled for a global prediction, 0 for the mean alone; a family may make it a setting."""

    # What a family defines -----------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """L_0 before the first round."""

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """What the server sends: all of L_0 unless a family says otherwise."""
        return server

    @abstractmethod
    def centre(self, received: Arrays) -> Tensor:
        """Where clients begin [d]."""

    def common(self, received: Arrays) -> Arrays:
        """Where the head and buffers of a client begin: as received, unless a family keeps several of them."""
        return received

    @abstractmethod
    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """mu and target with mu (m - target) = kl_weight d KL / dm / |D_i|, for clients with these sizes [C]."""

    def head_pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull | None:
        """The same for the head where it is trained: none, unless a family has a prior for it."""
        return None

    @abstractmethod
    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """KL(q_i || p(theta | phi*)) up to a constant, for m [C, d] -> [C]."""

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """What `kl` leaves out of KL(q_i || p(theta | phi*)) although phi changes it, such as 1/2 log|Sigma|: nothing."""
        return torch.zeros((), dtype=torch.float64)

    @abstractmethod
    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """KL(q(phi) || p(phi))."""

    @abstractmethod
    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """E_{q(phi) q_i}[log p(theta_i | phi)] up to a constant, for m [C, d] -> [C]."""

    @abstractmethod
    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """The sums that `aggregate` needs."""

    @abstractmethod
    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """argmin of L_0 (Alg. 1, step 5)."""

    @abstractmethod
    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """theta^(s) ~ int p(theta | phi) q(phi) dphi, [count, d]."""

    # What every family inherits ------------------------------------------------------------------------------------------

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """The last iterate, where clients begin at it; `seen` is 0 before a client's first round."""
        if self.begin != "last":
            return {}
        return {
            "m": repeat(problem.network.theta, len(clients)),
            "seen": problem.network.theta.new_zeros(len(clients), 1),
        }

    def beginning(self, problem: Problem, received: Arrays, clients: Clients) -> Weights:
        """Where clients that do not begin at their last iterate do: at the centre."""
        return start_weights(problem, self.centre(received), self.common(received), len(clients))

    def fit(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
        pull: Pull | None = None,
        beside: Callable[[Batch, Tensor], None] | None = None,
        average: float = 0.0,
    ) -> tuple[Weights, Arrays]:
        """min over m_i of L_i by proximal SGD (eq:elbo_1_indiv): the expected loss on minibatches, the KL by its pull.

        SGD at one learning rate wanders about the minimum as draws from q_i would: with `average`, m_i is the mean of its end.
        """
        start = self.beginning(problem, received, clients)
        if "m" in memory:
            start.theta = torch.where(memory["seen"].bool(), memory["m"], start.theta)
        iterates = Iterates.last(start, clients, plan, average) if average > 0 else None
        head_pull = None
        if self.kl_weight > 0:
            sizes = clients.sizes.to(problem.network.device)
            pull = self.pull(problem, received, sizes) if pull is None else pull
            head_pull = self.head_pull(problem, received, sizes) if plan.train_head else None
        prior: Any = {"pull": pull, "head_pull": head_pull, "p_do": self.p_do}
        weights, reports = train(
            problem.network,
            problem.likelihood,
            start,
            clients,
            plan,
            rng,
            **prior,
            beside=iterates or beside,
        )
        if iterates is not None:
            iterates.settle()
        return weights, reports | self.reports(problem, received, weights.theta)

    def reports(self, problem: Problem, received: Arrays, m: Tensor) -> Arrays:
        """What clients report beside their loss: their KL [C]."""
        return {"kl": self.kl(problem, received, m).double()}

    def total_kl(self, problem: Problem, received: Arrays, summary: Arrays) -> float:
        """The cohort's KL terms, summed."""
        return summary["kl"].item()

    def found(self, weights: Weights, received: Arrays, reports: Arrays) -> Arrays:
        """What a client sends: m_i, and the head and buffers that are shared."""
        return (
            {"m": weights.theta}
            | {key: getattr(weights, key) for key in ("head", "buffers") if key in received}
            | reports
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
        """Alg. 1, step 3."""
        weights, reports = self.fit(problem, received, clients, memory, plan, rng)
        return self.found(weights, received, reports), self.recall(weights, memory)

    def recall(self, weights: Weights, memory: Arrays) -> Arrays:
        """The clients' new memory."""
        return (
            {"m": weights.theta.clone(), "seen": torch.ones_like(memory["seen"])}
            if memory
            else memory
        )

    def mean(self, problem: Problem, server: Arrays) -> Tensor:
        """The mean of theta under q(phi) [d], for prediction without sampling."""
        return self.centre(server)

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Alg. 2: the mean prediction of S sampled networks."""
        if self.num_samples == 0:
            theta = self.mean(problem, server).unsqueeze(0)
        else:
            theta = self.sample(problem, server, self.num_samples, rng(SERVER, "predict")).to(
                problem.network.dtype
            )
        weights = start_weights(
            problem, self.mean(problem, server), self.common(server), len(theta)
        )
        weights.theta = theta
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
        """Alg. 3: the client update with the head trained too; the prediction is taken at m, the mean of the last iterates."""
        received = self.broadcast(server, clients.ids.tolist())
        weights, _ = self.fit(problem, received, clients, {}, plan, rng, average=self.average)
        return Personalised.point(problem, weights)

    # The objectives, as functions ------------------------------------------------------------------------------------------

    def expected_loss(
        self, problem: Problem, received: Arrays, clients: Clients, m: Tensor
    ) -> Tensor:
        """-log p(D_i | m_i) for each client, over all of its training data: m [C, d] -> [C]."""
        weights = start_weights(problem, self.centre(received), self.common(received), len(clients))
        total = []
        for c in range(len(clients)):
            x, y = clients.train.examples(c)
            one = Weights(m[c : c + 1], weights.head[c : c + 1], weights.buffers[c : c + 1])
            total.append(
                problem.likelihood.loss(
                    problem.network.outputs(one, x.unsqueeze(0)), y.unsqueeze(0)
                ).sum()
            )
        return torch.stack(total)

    def client_objective(
        self, problem: Problem, received: Arrays, clients: Clients, m: Tensor
    ) -> Tensor:
        """L_i for each client [C] (eq:elbo_1_indiv), up to a constant."""
        return self.expected_loss(problem, received, clients, m) + self.kl_weight * self.kl(
            problem, received, m
        )

    def server_objective(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """L_0 (eq:elbo_2) for the m [N_f, d] of a cohort, up to a constant."""
        scale = problem.federation.num_clients / len(m)
        return (
            self.global_kl(problem, server)
            - scale * self.expected_log_prior(problem, server, m).sum()
        )

    def negative_elbo(
        self, problem: Problem, server: Arrays, clients: Clients, m: Tensor
    ) -> Tensor:
        """L (eq:elbo), as the N / N_f estimate where `clients` are a cohort; up to a constant."""
        scale, rest = (
            problem.federation.num_clients / len(clients),
            self.server_objective(problem, server, m),
        )
        return scale * self.expected_loss(problem, server, clients, m).sum() + self.kl_weight * rest

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """The negative ELBO from the clients' running losses, and the KL's share of their objective."""
        count = summary["count"].item()
        loss, kl = summary["loss"].item(), self.kl_weight * self.total_kl(problem, server, summary)
        N, normaliser = problem.federation.num_clients, float(self.log_normaliser(problem, server))
        nelbo = N / count * (loss + kl) + self.kl_weight * (
            N * normaliser + float(self.global_kl(problem, server))
        )
        return {
            "negative_elbo": nelbo,
            "kl": kl / count,
            "penalty_share": kl / (loss + kl) if loss + kl else 0.0,
        }
