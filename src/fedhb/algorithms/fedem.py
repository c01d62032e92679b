"""FedEM (Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS
2021).

Every client's data are a mixture of M common distributions, p(y | x, i) = sum_k pi_ik
p(y | x, theta_k): the learners theta_k are shared, the weights pi_i are the client's own. Each
round, the clients i in the cohort receive all theta_k and take, for all examples (x, y) of D_i,

    E:  q(k | x, y) <- pi_ik p(y | x, theta_k) / sum_l pi_il p(y | x, theta_l)
    M:  pi_ik       <- mean of q(k | x, y) over D_i
        theta_ik    <- tau epochs of SGD on q(k | x, y) (-log p(y | x, theta)) from theta_k

and the server, for each k,

    theta_k <- sum_i |D_i| theta_ik / sum_i |D_i|

Clients remember pi_i, which is uniform before their first round.
Global prediction: sum_k pi_k p(y | x, theta_k) with the client's own pi. For a client that never
took part, and where no client is named, pi is the mean (by size) of the last round's clients, which
gives no weight to a learner that nobody uses.
Personalisation: pi by E-steps with the learners fixed, and then (`tune`) M-steps on them with the
head trained too. The authors leave the learners of new clients as they are (tune=False). The tables
that this library is compared with fine-tune the weights of every method, so that is the default.
Sent: M d down, M d and the M numbers pi_i up.

What differs from the authors' code: the mean is over the round's participants (there over all
clients, idle ones counted with the old learners, which damps each round by the fraction). Momentum
begins anew each round (there it outlives the weights it belongs to). The M learners of a client see
the same minibatches. Learners begin as several_networks.py says, not from M seeds.

The tuned `noise`, 0.001, is for clients that differ in the shares of their labels. Where they are
of several kinds (the same x, other y), learners that begin so near each other may not part;
noise=0, different networks, tells the kinds apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Kind, Personalised, Problem, Shares
from fedhb.algorithms.fedavg import Averaging
from fedhb.algorithms.several_networks import different_starts, learner_of, side_by_side
from fedhb.algorithms.toolbox import mixture_prediction, start_weights
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.network.vectors import Weights
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd

EXAMPLES_AT_ONCE = 512
"""Examples whose likelihood is computed at once. Networks that normalise by the batch see all of a
client's data."""


@dataclass(frozen=True)
class FedEM(Averaging):
    """A mixture of shared learners with each client's own weights."""

    name: ClassVar[str] = "fedem"
    answer: ClassVar[Mapping[str, Kind]] = {**Averaging.answer, "pi": Shares()}
    keeps: ClassVar[str] = "mixture weights"
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.1,
        "momentum": 0.9,
        "personal_lr": 0.001,
        "personal_epochs": 15,
    }
    num_learners: int = setting(3, "M, the shared networks", positive=True)
    noise: float = setting(
        0.001,
        "learners begin at the initial network plus noise of this deviation; 0: as different "
        "networks",
        least=0.0,
    )
    pi_steps: int = setting(
        10, "E-steps by which personalisation finds a client's weights", positive=True
    )
    tune: bool = setting(True, "personalisation trains the learners too, else the weights alone")

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return M different networks (equal ones would stay equal), and uniform pi."""
        M, network = self.num_learners, problem.network
        starts = different_starts(problem, M, self.update, self.noise, rng)
        for k, l in combinations(range(M), 2):
            if all(torch.equal(value[k], value[l]) for value in starts.values()):
                raise InputError(
                    "two learners would begin alike, and so stay: give fedem.noise a small value "
                    "such as 0.01, or an initial network whose weights are not constant"
                )
        pi = torch.full((M,), 1.0 / M, dtype=network.dtype, device=network.device)
        return starts | {"pi": pi}

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send the learners."""
        return {key: value for key, value in server.items() if key != "pi"}

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember pi, at first uniform; `seen` is 0 before a client's first round."""
        M, network = self.num_learners, problem.network
        pi = torch.full((len(clients), M), 1.0 / M, dtype=network.dtype, device=network.device)
        return {"pi": pi, "seen": torch.zeros_like(pi[:, :1])}

    def e_step(
        self, problem: Problem, received: Arrays, clients: Clients, pi: Tensor, steps: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Take E-steps from pi [C, M].

        Returns:
            q(k | x, y) [M, held] of all examples, client after client, and each client's mean of
            them, the new pi [C, M].
        """
        learners = start_weights(problem, received["theta"], received, self.num_learners)
        pi = pi.to(received["theta"])
        every_q, every_pi = [], []
        for c, pi_i in enumerate(pi.double()):
            loss = losses(problem, learners, *clients.train.examples(c))
            for _ in range(steps):
                q = (pi_i.log().unsqueeze(1) - loss).softmax(0)
                pi_i = q.mean(1)
            every_q.append(q)
            every_pi.append(pi_i)
        return torch.cat(every_q, dim=1).to(pi.dtype), torch.stack(every_pi).to(pi.dtype)

    def m_step(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        q: Tensor,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Weights, Arrays]:
        """Return theta_ik, heads and buffers [C, M, ...], and each learner's reports [C, M]."""
        network, learners, reports = problem.network, [], []
        for k in range(self.num_learners):
            learner = learner_of(received, k)
            start = start_weights(problem, learner["theta"], learner, len(clients))
            solver = Sgd(network, start, plan)
            for batch in batches(clients, plan, rng, merge_single=network.has_batch_norm):
                solver.step(batch, problem.likelihood, example_weights=q[k][batch.held])
            learners.append(solver.weights)
            reports.append(solver.report())
        return side_by_side(learners), {
            key: torch.stack([report[key] for report in reports], dim=1)
            for key in ("loss", "score")
        }

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Take one E-step and one M-step.

        The client reports the mean of its learners' losses and scores under pi.
        """
        q, pi = self.e_step(problem, received, clients, memory["pi"])
        weights, each = self.m_step(problem, received, clients, q, plan, rng)
        reports = {key: (pi.double() * value).sum(1) for key, value in each.items()}
        answers = {key: getattr(weights, key) for key in received} | reports
        memory = {"pi": pi.clone(), "seen": torch.ones_like(memory["seen"])}
        return answers | {"pi": pi, "examples": clients.sizes.double()}, memory

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the sums of FedAvg for each learner, and sum_i w_i pi_i."""
        pi = answers["pi"].double()
        weight = self.weight(answers).to(pi.device).unsqueeze(1)
        sums = super().summarise(problem, received, answers, rng)
        return sums | {"pi": (weight * pi).sum(0)}

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the mean of each learner, and of pi."""
        pi = summary["pi"] / summary["weight"]
        return super().aggregate(problem, server, summary, rng) | {"pi": pi.to(server["pi"].dtype)}

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return the mean pi of the round's clients, and exp(its entropy)."""
        pi = summary["pi"] / summary["weight"]
        entropy = -(pi * pi.clamp_min(1e-300).log()).sum()
        return {"pi": pi.tolist(), "effective_learners": entropy.exp().item()}

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return sum_k pi_k p(y | x, theta_k), mixed as probabilities.

        pi is the client's own where its memory [1, ...] is given.
        """
        pi = memory["pi"][0] if memory and memory["seen"][0] else server["pi"]
        learners = start_weights(problem, server["theta"], server, self.num_learners)
        shares = pi.to(server["pi"]).unsqueeze(1).expand(-1, len(x))
        return mixture_prediction(problem, learners, shares, x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Take E-steps from the client's pi, then the client update's M-step with the head too."""
        received = self.broadcast(server, clients.ids.tolist())
        q, pi = self.e_step(problem, received, clients, memory["pi"], self.pi_steps)
        if self.tune:
            weights, _ = self.m_step(problem, received, clients, q, plan, rng)
        else:
            learners = [learner_of(received, k) for k in range(self.num_learners)]
            weights = side_by_side(
                [start_weights(problem, each["theta"], each, len(clients)) for each in learners]
            )
        return Personalised(problem, weights.theta, weights.head, weights.buffers, pi)


def losses(problem: Problem, learners: Weights, x: Tensor, y: Tensor) -> Tensor:
    """Return -log p(y | x, theta_k) of n examples under M learners, [M, n] in float64."""
    M = len(learners.theta)
    size = len(x) if problem.network.normalises_by_batch else EXAMPLES_AT_ONCE
    parts = []
    for x_part, y_part in zip(x.split(size), y.split(size), strict=True):
        outputs = problem.network.outputs(learners, x_part.expand(M, *x_part.shape))
        loss = problem.likelihood.loss(outputs, y_part.expand(M, *y_part.shape))
        parts.append(loss.double())
    return torch.cat(parts, dim=1)
