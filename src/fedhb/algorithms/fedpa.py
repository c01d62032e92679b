"""FedPA (Al-Shedivat et al., "Federated Learning via Posterior Averaging", ICLR 2021).

The global posterior is the product of the clients' N(mu_i, Sigma_i). The gradient of its negative
logarithm at theta is the sum of Delta_i = Sigma_i^-1 (theta - mu_i), which clients estimate from
samples of their own posteriors:

    each round, the server sends theta to the clients i in the cohort
        x_1 .. x_l <- SGD on D_i from theta: after a burn-in, the averages of the iterates over l
                      segments (IASG)
        Delta_i <- Sigma^-1 (theta - mean x),  Sigma = r I + (1 - r) S,
                   S the sample covariance,  r = 1 / (1 + (l - 1) rho)
    Delta <- sum_i |D_i| Delta_i / sum_i |D_i|
    velocity <- momentum velocity + Delta,   theta <- theta - server_lr velocity

Sigma^-1 = (1 + (l - 1) rho) A^-1 with A = I + rho sum_t (x_t - mean)(x_t - mean)'. Sample t adds
rho (t - 1)/t u u' to A, u being its distance from the mean of those before. So (Sherman and
Morrison) A^-1 (mean - theta) follows from dot products with the vectors v_k = A_{k-1}^-1 u_k of the
earlier samples: O(l^2 d) operations, O(l d) memory, no matrix (`posterior_point`).

The first `warm_up` rounds are FedAvg's. A single sample is the last iterate: FedAvg, to the bit
with server_lr 1 and no momentum. Global prediction and personalisation are FedAvg's.
Sent: d down, d up.

What differs from the authors' code (TFF): a client sends theta - Delta_i, the same d numbers.
Burn-in and segments are shares of the local training instead of whole epochs, since one local epoch
would leave no sample: their 1 + 4 epochs are burn_in 0.2. 0.8 suits one epoch, most of which is
transient; of ten steps it leaves two or three, each a sample. A delta that is not finite ends the
run with an error instead of silently skipping the round. Batch norm's buffers are averaged. The
server steps by 1 without momentum unless tuned (theirs: 0.5 and 0.9).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.toolbox import SHARED, average_shared, start_weights, step
from fedhb.clients.clients import Clients
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.average import Iterates
from fedhb.training.plan import Plan
from fedhb.training.sgd import train


@dataclass(frozen=True)
class FedPA(FedAvg):
    """FedAvg whose clients correct their step by the covariance of their own posterior."""

    name: ClassVar[str] = "fedpa"
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    rho: float = setting(
        0.001, "weight of the sample covariance against the identity (shrinkage)", least=0.0
    )
    local_samples: int = setting(
        4, "l, posterior samples of a client in a round; 1 is FedAvg", positive=True
    )
    burn_in: float = setting(
        0.8, "share of a client's local training before its first sample", least=0.0, most=1.0
    )
    warm_up: int = setting(0, "rounds of FedAvg before the first posterior samples", least=0)
    server_lr: float = setting(1.0, "the server's step on the averaged delta", positive=True)
    server_momentum: float = setting(0.0, "momentum of the server's step", least=0.0, most=1.0)

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return the initial network, zero velocities, and zero rounds."""
        server = super().start(problem, rng)
        keys = [key for key in ("theta", "head") if key in server]
        velocities = {f"{key}_velocity": torch.zeros_like(server[key]) for key in keys}
        return server | velocities | {"rounds": torch.zeros((), dtype=torch.int64)}

    def sampling(self, server: Arrays) -> bool:
        """Return whether clients sample in the next round, or answer as in FedAvg."""
        return self.local_samples > 1 and int(server["rounds"]) >= self.warm_up

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send theta, the head where it is trained, and an empty array if clients are to sample."""
        sent = {key: server[key] for key in ("theta", *SHARED) if key in server}
        return sent | ({"sample": server["theta"].new_zeros(0)} if self.sampling(server) else {})

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return theta - Delta_i, and buffers as SGD left them.

        Body and head are one vector where both are trained.
        """
        if "sample" not in received:
            return super().local_update(problem, received, clients, memory, plan, rng)
        keys = [key for key in ("theta", "head") if key in received]
        start = start_weights(problem, received["theta"], received, len(clients))
        examples = (plan.epochs * clients.sizes).tolist()
        iterates = Iterates(start, "head" in keys, examples, self.burn_in, self.local_samples)
        weights, reports = train(
            problem.network, problem.likelihood, start, clients, plan, rng, beside=iterates
        )
        sent = torch.cat([received[key] for key in keys])
        samples = [iterates.averages(c) for c in range(len(clients))]
        if max(map(len, samples)) == 1:
            warnings.warn(
                "fedpa's clients take too few steps for a second sample "
                f"(burn_in={self.burn_in}), and answer as in FedAvg: give more local epochs, "
                "smaller batches, or a smaller fedpa.burn_in",
                stacklevel=2,
            )
        lengths = [len(received[key]) for key in keys]
        for c in range(len(clients)):
            point = posterior_point(sent, samples[c], self.rho)
            for key, part in zip(keys, point.split(lengths), strict=True):
                getattr(weights, key)[c] = part
        answers = {key: getattr(weights, key) for key in ("theta", *SHARED) if key in received}
        return answers | reports, memory

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Take a step of SGD with momentum on the averaged delta; average the buffers."""
        new = {"theta": server["theta"], **average_shared(server, summary)}
        for key in ("theta", "head"):
            if key in summary:
                delta = summary[key] / summary["weight"]
                velocity = self.server_momentum * server[f"{key}_velocity"] + delta
                new[key] = step(server[key], self.server_lr * velocity)
                new[f"{key}_velocity"] = velocity.to(server[key].dtype)
        return new | {"rounds": server["rounds"] + 1}

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return whether clients were to sample, and the length of the averaged delta."""
        delta = summary["theta"] / summary["weight"]
        return {"sampled": self.sampling(server), "delta": delta.norm().item()}


def posterior_point(theta: Tensor, samples: Sequence[Tensor], rho: float) -> Tensor:
    """Return theta - Sigma^-1 (theta - mean x) for samples x_1 .. x_l [d]; for one, x_1 itself."""
    mean = samples[0].clone()
    point = samples[0].clone()  # theta + A^-1 (mean - theta), for the samples so far
    earlier: list[tuple[Tensor, float]] = []  # v_k, and gamma_k / (1 + gamma_k u_k.v_k)
    for t, x in enumerate(samples[1:], start=2):
        u = x - mean
        v = u.clone()
        for v_k, c_k in earlier:
            v.sub_(v_k, alpha=c_k * float(v_k @ u))
        gamma, uv = rho * (t - 1) / t, float(u @ v)
        c = gamma / (1.0 + gamma * uv)
        point.add_(v, alpha=(1.0 - c * (t * float(u @ (point - theta)) + uv)) / t)
        mean.add_(u, alpha=1.0 / t)
        earlier.append((v, c))
    return point.add_(point - theta, alpha=(len(samples) - 1) * rho)
