r"""The general framework (Alg. 1 to 3) for p(phi) prod_i p(theta_i | phi) p(D_i | theta_i).

The posterior is approximated by q(phi; L_0) prod_i q_i(theta_i; L_i). The negative ELBO (eq:elbo)

    L = sum_i ( E_{q_i}[-log p(D_i | theta_i)] + E_{q(phi)} KL(q_i || p(theta_i | phi)) )
        + KL(q(phi) || p(phi))

is lowered over the clients' L_i with L_0 fixed (eq:elbo_1_indiv), and then over L_0 with the L_i
fixed (eq:elbo_2). The clients' KL is taken at phi*, the mode of q(phi) (appeq:niw_Ekl), and a
cohort of N_f stands for all N clients (Alg. 1):

    L_i = E_{q_i}[-log p(D_i | theta_i)] + KL(q_i || p(theta_i | phi*))
    L_0 = KL(q(phi) || p(phi)) - (N / N_f) sum_{i in cohort} E[log p(theta_i | phi)]

A **family** is a subclass that says what p(theta | phi) and q(phi) are. All families here have
clients' q_i that are narrow around m_i. So L_i = m_i, and the expected loss is taken at m_i (or at
a dropout sample of it). A family defines

    start, summarise, aggregate     L_0, the sums it needs, and their solution (Alg. 1, step 5)
    centre                          where clients begin
    pull                            the gradient of KL / |D_i| at m, as mu (m - target)
    kl, global_kl, expected_log_prior   the terms of the objectives (objectives.py), up to constants
    sample                          theta ~ int p(theta | phi) q(phi) dphi

and inherits the client update, the global prediction (Alg. 2) and personalisation (Alg. 3).
docs/adding_an_algorithm.md adds a third family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import AlgorithmBase, Arrays, Personalised, Problem
from fedhb.algorithms.objectives import of_round
from fedhb.algorithms.toolbox import mixture_prediction, repeat, start_weights, uniform
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.average import Iterates
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train


@dataclass(frozen=True)
class Hierarchical(AlgorithmBase, ABC):
    """The base of the hierarchical Bayesian algorithms."""

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
    """Probability that the clients' q_i keep a column; a family with dropout makes it a setting."""
    num_samples = 1
    """S, networks sampled for a global prediction, 0 for the mean; it may be made a setting."""

    # What a family defines --------------------------------------------------------------------

    @abstractmethod
    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return L_0 before the first round."""

    @abstractmethod
    def centre(self, received: Arrays) -> Tensor:
        """Return where clients begin [d]."""

    def common(self, received: Arrays) -> Arrays:
        """Return the head and buffers that clients begin with: those received."""
        return received

    @abstractmethod
    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """Return mu and target with mu (m - target) = kl_weight d KL / dm / |D_i|, sizes [C].

        Where the KL is not quadratic, it is the slope of a quadratic bound that touches it at m.
        """

    def head_pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull | None:
        """Return mu and target for a trained head: none, unless the family has a prior for it."""
        return None

    @abstractmethod
    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """Return KL(q_i || p(theta | phi*)) up to a constant, for m [C, d] -> [C]."""

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """Return the part of KL(q_i || p(theta | phi*)) that `kl` leaves out and phi changes.

        An example is 1/2 log|Sigma|. Here it is nothing.
        """
        return torch.zeros((), dtype=torch.float64)

    @abstractmethod
    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """Return KL(q(phi) || p(phi))."""

    @abstractmethod
    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """Return E_{q(phi) q_i}[log p(theta_i | phi)] up to a constant, for m [C, d] -> [C]."""

    @abstractmethod
    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the sums that `aggregate` needs."""

    @abstractmethod
    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return argmin L_0 (Alg. 1, step 5)."""

    @abstractmethod
    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """Draw theta^(s) ~ int p(theta | phi) q(phi) dphi, [count, d]."""

    # Alg. 1, step 3: the client's update ------------------------------------------------------

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember the last iterate where clients begin there; `seen` is 0 before a first round."""
        if self.begin != "last":
            return {}
        return {
            "m": repeat(problem.network.theta, len(clients)),
            "seen": problem.network.theta.new_zeros(len(clients), 1),
        }

    def beginning(self, problem: Problem, received: Arrays, clients: Clients) -> Weights:
        """Return where clients begin that do not begin at their last iterate: the centre."""
        return start_weights(problem, self.centre(received), self.common(received), len(clients))

    def starting_point(
        self, problem: Problem, received: Arrays, clients: Clients, memory: Arrays
    ) -> Weights:
        """Return where these clients begin: at their last iterate if they remember one."""
        start = self.beginning(problem, received, clients)
        if "m" in memory:
            start.theta = torch.where(memory["seen"].bool(), memory["m"], start.theta)
        return start

    def penalty(self, problem: Problem, received: Arrays, clients: Clients, plan: Plan) -> Penalty:
        """Return the prior's pulls on the body and on a trained head, and the dropout."""
        if self.kl_weight == 0:
            return Penalty(p_do=self.p_do)
        sizes = clients.sizes.to(problem.network.device)
        head = self.head_pull(problem, received, sizes) if plan.train_head else None
        return Penalty(self.pull(problem, received, sizes), head, self.p_do)

    def reports(self, problem: Problem, received: Arrays, m: Tensor) -> Arrays:
        """Return what clients report beside their loss: their KL [C]."""
        return {"kl": self.kl(problem, received, m).double()}

    def answers_of(
        self, problem: Problem, received: Arrays, weights: Weights, reports: Arrays
    ) -> Arrays:
        """Return the clients' answers: m_i, the head and buffers that are shared, the reports."""
        shared = {key: getattr(weights, key) for key in ("head", "buffers") if key in received}
        reports = reports | self.reports(problem, received, weights.theta)
        return {"m": weights.theta} | shared | reports

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Minimise L_i over m_i (eq:elbo_1_indiv); return the answers and the new memories.

        Proximal SGD lowers the expected loss on minibatches, and the KL by its pull.
        """
        start = self.starting_point(problem, received, clients, memory)
        penalty = self.penalty(problem, received, clients, plan)
        weights, reports = train(
            problem.network, problem.likelihood, start, clients, plan, rng, penalty
        )
        answers = self.answers_of(problem, received, weights, reports)
        return answers, self.new_memory(weights, memory)

    def new_memory(self, weights: Weights, memory: Arrays) -> Arrays:
        """Return the last iterate, where clients remember it."""
        if not memory:
            return memory
        return {"m": weights.theta.clone(), "seen": torch.ones_like(memory["seen"])}

    # Alg. 2: global prediction ----------------------------------------------------------------

    def mean(self, problem: Problem, server: Arrays) -> Tensor:
        """Return the mean of theta under q(phi) [d], for a prediction without sampling."""
        return self.centre(server)

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the mean prediction of S sampled networks."""
        if self.num_samples == 0:
            theta = self.mean(problem, server).unsqueeze(0)
        else:
            theta = self.sample(problem, server, self.num_samples, rng(SERVER, "predict"))
            theta = theta.to(problem.network.dtype)
        weights = start_weights(
            problem, self.mean(problem, server), self.common(server), len(theta)
        )
        weights.theta = theta
        shares = uniform(len(theta), x, problem.network.dtype)
        return mixture_prediction(problem, weights, shares, x)

    # Alg. 3: personalisation ------------------------------------------------------------------

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Return the point m_i of the client update, with the head trained too.

        SGD at one learning rate wanders about the minimum. With `average`, m_i is the mean of the
        last share of its steps.
        """
        received = self.broadcast(server, clients.ids.tolist())
        start = self.starting_point(problem, received, clients, {})
        penalty = self.penalty(problem, received, clients, plan)
        iterates = Iterates.last(start, clients, plan, self.average) if self.average > 0 else None
        weights, _ = train(
            problem.network, problem.likelihood, start, clients, plan, rng, penalty, iterates
        )
        if iterates is not None:
            iterates.settle()
        return Personalised.point(problem, weights)

    # Records ----------------------------------------------------------------------------------

    def total_kl(self, problem: Problem, received: Arrays, summary: Arrays) -> float:
        """Return the sum of the cohort's KL terms."""
        return summary["kl"].item()

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return the negative ELBO and the KL's share of the clients' objective."""
        return of_round(self, problem, server, summary)
