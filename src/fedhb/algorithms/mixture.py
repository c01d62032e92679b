"""The Mixture model (Alg. 7 to 9): K prototypes, and a gate that assigns inputs to them (gate.py).

    p(phi) = prod_j N(mu_j; 0, I),   p(theta_i | phi) = 1/K sum_j N(theta_i; mu_j, sigma2 I)
                                                                                        eq:mix_prior
    q(phi) = prod_j N(mu_j; r_j, eps^2 I),   q_i(theta_i) = N(theta_i; m_i, eps^2 I)     eq:mix_vi_q

Clients minimise (eq:mix_client_opt2)

    -log p(D_i | m_i) - log sum_j exp(-||m_i - r_j||^2 / (2 sigma2))

and train the gate. The server takes one EM step on its objective (eq:mix_server),

    E: c(j|i) = softmax_j(-||m_i - r_j||^2 / (2 sigma2))
    M: r_j = mean_i c(j|i) m_i / (sigma2 / N + mean_i c(j|i))

and averages beta. N(0, I), and with it sigma2 / N in the M-step, is there with `shrink` alone: by
default the prior on the prototypes is flat. Global prediction: sum_j g_j(x) p(y | x, r_j). eps is
so small that q_i and q(phi) are taken at their means. Sent: (K+1)d down (r, beta), 2d up (m_i,
beta_i); with one prototype there is no gate: d and d.

A prototype that no client of a round is near to keeps its place: the formula has nothing to say
about it, or with `shrink` would move it to zero. After more than `patience` rounds alone it starts
again beside the most used one. `idle` [K] counts those rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedhb import distributions
from fedhb.algorithms.contract import Arrays, Kind, Problem, Release, Vector
from fedhb.algorithms.gate import (
    GateTraining,
    aggregate_gate,
    gate_probabilities,
    start_gate,
    summarise_gate,
)
from fedhb.algorithms.hierarchical import Hierarchical
from fedhb.algorithms.niw import PRINTED_TRAINING
from fedhb.algorithms.toolbox import (
    SHARED_ANSWERS,
    average_shared,
    differences,
    mixture_prediction,
    repeat,
    shared_parts,
    start_weights,
    step,
    summarise_shared,
)
from fedhb.clients.clients import Clients, Share
from fedhb.network.vectors import Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

SAMPLE = 100
"""Examples by which a client chooses the prototype to begin at."""

ALIVE = 1e-6
"""The mean responsibility from which on a prototype counts as used in a round."""


def without_clients(summary: Arrays, deviation: float) -> Arrays:
    """Return noised sums where prototypes whose mass does not exceed the noise have none."""
    mass = summary["c"]
    return summary | {"c": torch.where(mass > 2.0 * deviation, mass, 0.0)}


@dataclass(frozen=True)
class Mixture(Hierarchical):
    """The paper's mixture of K prototypes with a gate."""

    name: ClassVar[str] = "mixture"
    answer: ClassVar[Mapping[str, Kind]] = {
        "m": Vector(),
        **SHARED_ANSWERS,
        "buffers": Vector(),
        "beta": Vector("beta"),
        "beta_buffers": Vector("beta_buffers"),
    }
    release: ClassVar[Release | None] = Release(repair=without_clients)
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    begin: str = setting(
        "global",
        "where clients begin: global (the centre), last, or nearest (prototype)",
        choices=("global", "last", "nearest"),
    )
    num_prototypes: int = setting(2, "number of prototypes", positive=True)
    sigma2: float = setting(
        1.0, "variance of a client's weights around its prototype", positive=True
    )
    noise: float = setting(
        1e-3, "deviation of the first prototypes from the initial network", least=0.0
    )
    patience: int = setting(
        30, "rounds without clients after which a prototype starts again", least=0
    )
    shrink: bool = setting(False, "use the printed prior N(0, I) on the prototypes")

    @classmethod
    def as_printed(cls) -> dict[str, Any]:
        """Return every printed constant, as keywords of `fit`."""
        mixture = cls(update="body", kl_weight=1.0, num_prototypes=2, sigma2=0.1, shrink=True)
        return {"algorithm": mixture, **PRINTED_TRAINING}

    # Alg. 7: block-coordinate descent -----------------------------------------------------------

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return prototypes at one network plus small noise, and the gate.

        Equal prototypes would stay equal, and far ones would lose all clients.
        """
        theta, K = problem.network.theta, self.num_prototypes
        generator = rng(SERVER, "prototypes")
        noise = torch.randn(K, len(theta), generator=generator, dtype=torch.float32).to(theta)
        r = theta + (self.noise if K > 1 else 0.0) * noise
        server = {"r": r, "idle": torch.zeros(K, dtype=torch.int64)}
        shared = shared_parts(problem, self.update, shortens=self.shrink)
        if "buffers" in shared:
            server["buffers"] = repeat(shared.pop("buffers"), K)
        if K > 1:
            server |= start_gate(problem)
        return server | shared

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send all but the count of idle rounds."""
        return {key: value for key, value in server.items() if key != "idle"}

    def centre(self, received: Arrays) -> Tensor:
        """Return the mean of the prototypes."""
        return received["r"].mean(0)

    def common(self, received: Arrays) -> Arrays:
        """Return the head, and the mean of the prototypes' buffers."""
        if "buffers" not in received:
            return received
        return received | {"buffers": received["buffers"].mean(0)}

    def beginning(self, problem: Problem, received: Arrays, clients: Clients) -> Weights:
        """Return the centre, or the prototype of least loss on a sample of the client's data."""
        start = super().beginning(problem, received, clients)
        if self.begin == "nearest" and len(received["r"]) > 1:
            for c, j in enumerate(self.likeliest(problem, received, clients)):
                start.theta[c] = received["r"][j]
                if "buffers" in received:
                    start.buffers[c] = received["buffers"][j]
        return start

    def likeliest(self, problem: Problem, received: Arrays, clients: Clients) -> list[int]:
        """Return argmax_j log p(sample of D_i | r_j) of each client."""
        prototypes = self.prototypes(problem, received)
        K, best = len(prototypes.theta), []
        for c in range(len(clients)):
            x, y = clients.train.examples(c, SAMPLE)
            outputs = problem.network.outputs(prototypes, x.expand(K, *x.shape))
            loss = problem.likelihood.loss(outputs, y.expand(K, *y.shape))
            best.append(int(loss.sum(1).argmin()))
        return best

    def prototypes(self, problem: Problem, server: Arrays) -> Weights:
        """Return the K prototypes as networks, each with its own buffers."""
        weights = start_weights(problem, server["r"][0], self.common(server), len(server["r"]))
        weights.theta = server["r"]
        weights.buffers = server.get("buffers", weights.buffers)
        return weights

    def pull(
        self, problem: Problem, received: Arrays, sizes: Tensor, nearness: Nearness | None = None
    ) -> Pull:
        """Return mu = kl_weight / (sigma2 |D_i|), towards sum_j c(j|m) r_j at the current m.

        This is Jensen's bound of the KL, as in EM.
        """
        r = received["r"]
        sizes = sizes[:1] if (sizes == sizes[0]).all() else sizes  # equal clients share one number
        mu = (self.kl_weight / (self.sigma2 * sizes.to(r.dtype))).unsqueeze(1)
        if len(r) == 1:
            return Pull(mu, r[0])
        nearness = nearness or Nearness(r, self.sigma2)
        return Pull(mu, r, nearness.responsibilities)

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Train m_i by proximal SGD, and beta_i on (x, j*) with the same minibatches."""
        if len(received["r"]) == 1:
            return super().local_update(problem, received, clients, memory, plan, rng)
        nearness = Nearness(received["r"], self.sigma2)
        gates = GateTraining(problem, received, len(clients), plan)

        def train_gate(batch: Batch, m: Tensor) -> None:
            gates.step(batch, j_star=nearness.scores(m).argmax(1))

        # the next step's pull asks for the same nearness that the gate has asked for
        start = self.starting_point(problem, received, clients, memory)
        sizes = clients.sizes.to(problem.network.device)
        pull = self.pull(problem, received, sizes, nearness) if self.kl_weight > 0 else None
        penalty = Penalty(pull, p_do=self.p_do)
        weights, reports = train(
            problem.network, problem.likelihood, start, clients, plan, rng, penalty, train_gate
        )
        answers = self.answers_of(problem, received, weights, reports) | gates.answers(received)
        return answers, self.new_memory(weights, memory)

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Take the E-step: return sum_i c(j|i), sum_i c(j|i) (m_i - r_j), and sums of beta_i."""
        m, r = answers["m"], received["r"]
        c = distributions.responsibilities(m, r, self.sigma2).double()  # [C, K]
        ones = torch.ones_like(answers["examples"])
        shared = {key: value for key, value in received.items() if key != "buffers"}
        sums = {"c": c.sum(0), "r": sums_by_prototype(m, r, c)}
        sums |= summarise_shared(answers, shared, ones)
        if "buffers" in received:
            buffers = sums_by_prototype(answers["buffers"], received["buffers"], c)
            sums["prototype_buffers"] = buffers
        return sums | summarise_gate(answers, received, ones)

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Take the M-step on prototypes that have clients; the others wait (module docstring)."""
        count, mass = summary["count"], summary["c"].unsqueeze(1)
        alive = summary["c"] / count >= ALIVE
        mean = server["r"].double() + summary["r"] / mass.clamp_min(ALIVE)
        # r_j = sum_i c m_i / (sigma2 N_f / N + sum_i c), with sum_i c m_i = mass * mean
        extra = self.sigma2 * count / problem.federation.num_clients if self.shrink else 0.0
        r = torch.where(alive.unsqueeze(1), mass / (mass + extra) * mean, server["r"].double())
        idle = torch.where(alive, 0, server["idle"] + 1)
        restart = idle > self.patience
        if restart.any():
            generator = rng(SERVER, "respawn")
            shape = server["r"].shape
            noise = torch.randn(shape, generator=generator, dtype=torch.float32).to(r)
            beside = r[summary["c"].argmax()] + self.noise * noise
            r = torch.where(restart.unsqueeze(1), beside, r)
            idle = torch.where(restart, 0, idle)
        new = {"r": r.to(server["r"].dtype), "idle": idle, **average_shared(server, summary)}
        if "prototype_buffers" in summary:
            moved = summary["prototype_buffers"] / mass.clamp_min(ALIVE)
            buffers = step(server["buffers"], torch.where(alive.unsqueeze(1), moved, 0.0))
            most_used = buffers[summary["c"].argmax()]
            new["buffers"] = torch.where(restart.unsqueeze(1), most_used, buffers)
        return new | aggregate_gate(server, summary)

    # Alg. 8: global prediction ------------------------------------------------------------------

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return sum_j g_j(x) p(y | x, r_j), mixed as probabilities."""
        shares = gate_probabilities(problem, server, x)
        return mixture_prediction(problem, self.prototypes(problem, server), shares, x)

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """Draw theta ~ 1/K sum_j N(r_j, sigma2 I), which the gate replaces in prediction."""
        j = torch.randint(len(server["r"]), (count,), generator=generator)
        noise = torch.randn(count, problem.network.num_params, generator=generator)
        return server["r"][j] + self.sigma2**0.5 * noise.to(server["r"])

    # The terms of the objectives ----------------------------------------------------------------

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """Return -log 1/K sum_j exp(-||m_i - r_j||^2 / (2 sigma2)), which is never negative."""
        penalty = distributions.mixture_penalty(m, received["r"], self.sigma2)
        return penalty + math.log(len(received["r"]))

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """Return 1/2 sum_j ||r_j||^2, or nothing under a flat prior on the prototypes."""
        if not self.shrink:
            return torch.zeros((), dtype=torch.float64)
        return 0.5 * server["r"].double().square().sum()

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """Return log 1/K sum_j exp(-||m_i - r_j||^2 / (2 sigma2))."""
        return -self.kl(problem, server, m)

    # Records and reports --------------------------------------------------------------------------

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return the objective, mean responsibilities, and exp(their entropy)."""
        share = summary["c"] / summary["c"].sum()
        entropy = -(share * share.clamp_min(1e-300).log()).sum()
        return super().report(problem, server, summary) | {
            "responsibilities": share.tolist(),
            "effective_prototypes": entropy.exp().item(),
        }

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Return the distances between the prototypes [K, K]."""
        r = server["r"].double()
        return {"distances": torch.cdist(r, r).tolist()}

    def describe_personal(
        self, problem: Problem, server: Arrays, theta: Tensor
    ) -> Mapping[str, Tensor]:
        """Return c(j|i) [C, K] at the clients' personal weights."""
        c = distributions.responsibilities(theta, server["r"], self.sigma2)
        return {"responsibilities": c}

    def describe_examples(
        self, problem: Problem, server: Arrays, share: Share, most: int
    ) -> dict[str, Any]:
        """Return the mean gate by client and by class, and each prototype's accuracy by class."""
        K, classes = len(server["r"]), problem.federation.num_classes
        prototypes = self.prototypes(problem, server)
        gates, scores, labels = [], [], []
        for k in range(
            len(share.sizes)
        ):  # alone: batch norm may take its statistics from the batch
            x, y = share.examples(k, most)
            gates.append(gate_probabilities(problem, server, x).double().cpu())
            outputs = problem.network.outputs(prototypes, x.expand(K, *x.shape))
            score = problem.likelihood.score(outputs, y.expand(K, *y.shape))
            scores.append(score.double().cpu())
            labels.append(y.cpu())
        by_client = {"gate": [g.mean(1).tolist() for g in gates]}
        if classes is None:
            return by_client
        y = torch.cat(labels)
        return by_client | {
            "gate_by_class": mean_by_class(torch.cat(gates, 1), y, classes).tolist(),
            "prototype_accuracy": mean_by_class(torch.cat(scores, 1), y, classes).tolist(),
        }


class Nearness:
    """How near clients at m [A, d] are to the prototypes r [K, d]; remembers the last question.

    One product with the K - 1 offsets from the first prototype, which are small: nothing cancels,
    and m is read once.
    """

    def __init__(self, r: Tensor, sigma2: float):
        self.sigma2, self.offsets = sigma2, r[1:] - r[0]
        self.bias = 0.5 * (self.offsets * (r[1:] + r[0])).sum(1)
        self._last: tuple[Tensor, int, Tensor] | None = None

    def scores(self, m: Tensor) -> Tensor:
        """Return -||m - r_j||^2 / 2, less that of the first prototype, [A, K]."""
        if self._last is not None:
            at, version, scores = self._last  # `at` keeps its memory from being used again
            if (m.data_ptr(), m.shape, m._version) == (at.data_ptr(), at.shape, version):
                return scores
        if len(self.offsets) == 1:  # a matrix product with a single column is slow
            products = torch.mv(m, self.offsets[0]).unsqueeze(1)
        else:
            products = m @ self.offsets.T
        scores = functional.pad(products - self.bias, (1, 0))
        self._last = m, m._version, scores
        return scores

    def responsibilities(self, m: Tensor) -> Tensor:
        """Return c(j|m) = softmax_j(-||m - r_j||^2 / (2 sigma2)), [A, K]."""
        return (self.scores(m) / self.sigma2).softmax(1)


def sums_by_prototype(vectors: Tensor, reference: Tensor, c: Tensor) -> Tensor:
    """Return sum_i c(j|i) (vectors_i - reference_j): [C, k], [K, k], c [C, K] -> [K, k]."""
    pairs = zip(reference, c.T, strict=True)
    return torch.stack([differences(vectors, r_j, c_j) for r_j, c_j in pairs])


def mean_by_class(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean of values [K, n] over each class [K, classes]; nan for an absent class."""
    sums = torch.zeros(len(values), classes, dtype=values.dtype).index_add_(1, labels, values)
    return sums / torch.bincount(labels, minlength=classes)
