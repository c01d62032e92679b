"""EmpiricalBayes: the paper's hierarchy with a prior whose variances are learned.

    p(theta_il | phi) = N(theta_il; mu_l, u_l I)     a variance u_l for each tensor l, head included
    q(mu) narrow around m0,  u_l a point,  q_i(theta_il) = N(m_il, v_il I)

    a round     clients minimise -log p(D_i | m_i) + 1/2 sum_l |m_il - m0_l|^2 / u_l
                (the last term times kl_weight; columns drop out with 1 - p_do), and measure
                the curvature of their loss at m_i                                  curvature.py
    server      u_l from the scatter of the m_i and their curvature                 variance.py
                m0 from the mean of the m_i, by a lengthened step                   server_step.py
    personal    the client's update under the u_l that is the better estimate, in as many steps
                as a client with many examples takes                                few_examples.py

Sent: d down (m0, and u_l), d up (m_i, and a few numbers for each tensor). docs/inference.md derives
it. The server keeps u_l as V0_l = n0 u_l, n0 = |D| + 3, like a one-dimensional NIW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms.contract import Arrays, Kind, Personalised, Problem, Release
from fedhb.algorithms.empirical_bayes import curvature, few_steps, server_step
from fedhb.algorithms.empirical_bayes.few_examples import in_as_many_steps
from fedhb.algorithms.empirical_bayes.variance import (
    PERSONAL,
    SERVER_ONLY,
    Evidence,
    learn,
    occam,
    scatter,
    unlearned,
)
from fedhb.algorithms.gaussian import Gaussian
from fedhb.algorithms.toolbox import average_shared, blocks, differences, shared_parts
from fedhb.clients.clients import Clients
from fedhb.likelihood import check_sample
from fedhb.network.vectors import Weights, per_weight, tensor_means, tensor_sizes
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull

MEASURED: Mapping[str, Kind] = {**curvature.ANSWERS, **few_steps.ANSWERS}


@dataclass(frozen=True)
class EmpiricalBayes(Gaussian):
    """The hierarchy with a learned prior: the default."""

    name: ClassVar[str] = "empirical-bayes"
    answer: ClassVar[Mapping[str, Kind]] = {**Gaussian.answer, **MEASURED}
    # u is learned from a few numbers, which even a hundredth of the noise would drown
    release: ClassVar[Release | None] = Release(
        withheld=("squares", "head_squares", *MEASURED), clip_answers=True
    )
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    num_samples: int = setting(0, "networks sampled for a prediction; 0 predicts at m0", least=0)
    lambda0: float = setting(0.0, "prior count on mu, a pull of m0 towards zero", least=0.0)
    prior_scale: float = setting(
        1.0, "deviation of a client's weights before it is learned", positive=True
    )

    # The prior --------------------------------------------------------------------------------

    def n0(self, problem: Problem) -> float:
        """Return n0 = |D| + 3."""
        return problem.federation.num_examples + 3.0

    def sizes(self, problem: Problem) -> list[int]:
        """Return d_l of the tensors that have a prior."""
        return tensor_sizes(problem.network, with_head=self.update == "full")

    def variance(self, problem: Problem, received: Arrays) -> Tensor:
        """Return u [L]."""
        return received["V0"].double() / self.n0(problem)

    def per_body_weight(self, problem: Problem, values: Tensor) -> Tensor:
        """Return a number for each tensor [L] as one for each weight of the body [d]."""
        return per_weight(values, self.sizes(problem))[: problem.network.num_params]

    def prior_precision(self, problem: Problem, received: Arrays) -> Tensor:
        """Return 1/u of each weight of the body [d]."""
        return 1.0 / self.per_body_weight(problem, self.variance(problem, received))

    def posterior(self, problem: Problem, server: Arrays) -> distributions.NormalInverseWishart:
        """Return q(phi) as d one-dimensional NIWs; all weights of a tensor have the same V0."""
        V0 = self.per_body_weight(problem, server["V0"])
        l0 = problem.federation.num_examples + self.lambda0
        return distributions.NormalInverseWishart(
            server["m0"], V0, l0=l0, n0=self.n0(problem), dof="per_coordinate"
        )

    # The rounds ---------------------------------------------------------------------------------

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return m0 = the initial network, u = prior_scale^2, a weak pull, and no evidence."""
        check_sample(problem.likelihood)
        m0 = problem.network.theta.clone()
        shared = shared_parts(problem, self.update, shortens=self.lambda0 > 0)
        V0 = m0.new_full((len(self.sizes(problem)),), self.n0(problem) * self.prior_scale**2)
        at_rest = server_step.at_rest([m0, *([shared["head"]] if "head" in shared else [])])
        return {"m0": m0, **unlearned(V0), **shared, **at_rest}

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send m0, u and what is shared beside them; the evidence stays with the server."""
        stays = (*SERVER_ONLY, server_step.LAST, server_step.FACTOR)
        return {key: value for key, value in server.items() if key not in stays}

    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """Return mu = kl_weight / (u |D_i|), towards m0."""
        sizes = sizes[:1] if (sizes == sizes[0]).all() else sizes  # equal clients share one row
        body = tensor_sizes(problem.network, with_head=False)
        precision = 1.0 / self.variance(problem, received)[: len(body)]
        mu = self.kl_weight * precision / sizes.unsqueeze(1)
        return Pull(mu, received["m0"], layers=body)

    def head_pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull | None:
        """Return the same for the head, where the federation trains it."""
        if "head" not in received:
            return None
        head = self.sizes(problem)[len(problem.network.body_slots) :]
        precision = 1.0 / self.variance(problem, received)[-len(head) :]
        mu = self.kl_weight * precision / sizes.unsqueeze(1)
        return Pull(mu, received["head"], layers=head)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Train, and measure curvature and reach at the weights that are sent."""
        answers, memory = super().local_update(problem, received, clients, memory, plan, rng)
        begun = self.beginning(problem, received, clients)
        weights = Weights(
            answers["m"], answers.get("head", begun.head), answers.get("buffers", begun.buffers)
        )
        measured = curvature.measure(problem, weights, clients, plan, rng)
        reach = self.reach(problem, received, clients, plan)
        return answers | measured | {k: v.to(weights.theta) for k, v in reach.items()}, memory

    def reach(self, problem: Problem, received: Arrays, clients: Clients, plan: Plan) -> Arrays:
        """Return few_steps.ANSWERS; zeros where clients do not begin at m0."""
        precision = self.kl_weight / self.variance(problem, received)
        merge = problem.network.has_batch_norm
        reach = few_steps.reach(clients.sizes.tolist(), plan, precision, merge)
        if self.begin == "global":
            return reach
        return {key: torch.zeros_like(value) for key, value in reach.items()}

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the sums of m_i - m0 and their squares, of the head too, and of measurements."""
        sums = super().summarise(problem, received, answers, rng)
        sums |= {key: answers[key].double().sum(0) for key in MEASURED}
        if "head" in received:
            sums["head_squares"] = torch.empty_like(received["head"])
            ones = torch.ones_like(answers["examples"])
            differences(answers["head"], received["head"], ones, sums["head_squares"])
        return sums

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the learned u, and m0 after a lengthened step to the mean of the m_i."""
        N, sizes = problem.federation.num_clients, self.sizes(problem)
        along = self.begin == "global"  # elsewhere clients do not go the way of server_step.py
        kept = 1.0 if along else N / (N + self.lambda0)
        means = {"m0": torch.empty_like(server["m0"]), **average_shared(server, summary)}
        for part in blocks(8, len(server["m0"])):  # several vectors at a time
            mean = torch.div(summary["m"][part], summary["count"])
            means["m0"][part] = mean.add_(server["m0"][part].double()).mul_(kept)
        examples = problem.federation.num_examples / N
        most = self.prior_scale**2
        learned = learn(server, summary, sizes, self.n0(problem), examples, most)
        precision = self.kl_weight / self.variance(problem, server)
        share = self.lambda0 / (N + self.lambda0)
        stretch = (
            server_step.stretch_of(server, summary, sizes, precision, share) if along else None
        )
        keys = [key for key in ("m0", "head") if key in means]
        return means | learned | server_step.lengthened(server, means, keys, stretch)

    # Personalisation ----------------------------------------------------------------------------

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Return the point m_i of the client's update under the personal variance."""
        personal, fit = server | {"V0": server[PERSONAL]}, super().personalise
        if self.kl_weight > 0:
            fit = partial(in_as_many_steps, fit)
        return fit(problem, personal, clients, memory, plan, rng)

    # The terms of the objectives ----------------------------------------------------------------

    def total_kl(self, problem: Problem, received: Arrays, summary: Arrays) -> float:
        """Return 1/2 sum_l sum_i |m_il - m0_l|^2 / u_l, of the head too."""
        sizes = torch.tensor(self.sizes(problem), device=summary["m"].device)
        squares = scatter(summary, sizes.tolist()) * sizes
        return 0.5 * float((squares / self.variance(problem, received)).sum())

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """Return 1/2 sum_l d_l log(1 + u_l h_l), the cost of q_i."""
        u = self.variance(problem, received)
        return occam(u, Evidence.of(received), self.sizes(problem))

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """Return the prior of mu, lambda0/2 sum_l |m0_l|^2 / u_l: u is a point."""
        body = tensor_sizes(problem.network, with_head=False)
        squares = tensor_means(server["m0"].square(), body).double()
        squares = squares * torch.tensor(body, device=squares.device)
        return 0.5 * self.lambda0 * (squares / self.variance(problem, server)[: len(body)]).sum()

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """Return -1/2 sum_l [ |m_il - m0_l|^2 / u_l + d_l log(1 + u_l h_l) ] over the body."""
        body = tensor_sizes(problem.network, with_head=False)
        u = self.variance(problem, server)[: len(body)]
        evidence = Evidence(*(row[: len(body)] for row in Evidence.of(server)))
        return -self.kl(problem, server, m) - occam(u, evidence, body)

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Return the learned deviation sqrt(u_l) of a client's weight around m0, by tensor."""
        return {"prior_deviation": self.variance(problem, server).sqrt().tolist()}
