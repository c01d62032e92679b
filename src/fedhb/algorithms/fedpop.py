"""FedPop (Kotelevskii et al., "FedPop: A Bayesian Approach for Personalised Federated Learning",
NeurIPS 2022).

The body theta is common to all clients, a point; client i's head z_i is a random effect with prior
N(mu_z, s^2 I).

    each round, the server sends theta to the clients i in the cohort
        z_i <- client i's own last head; mu_z in its first round
        Langevin: for every minibatch of `head_epochs` epochs, with eta = 2 lr / |D_i| and the body
            fixed,
            z_i <- z_i + eta/2 (grad log p(D_i | theta, z_i) + grad log N(z_i; mu_z, s^2 I))
                   + sqrt(eta) noise
            drops the first part of the chain (`burn_in`) and keeps `num_heads` iterates, evenly
            spaced in the rest
        theta_i <- tau epochs of SGD on D_i from theta, of the loss averaged over the kept heads
    theta <- sum_i |D_i| theta_i / sum_i |D_i|

eta/2 |D_i| = lr: the drift is a step of SGD, without momentum, on the mean loss. The prior acts
implicitly (as in training/proximal.py), so every s is stable. Each minibatch of the body draws one
of the kept heads: an unbiased gradient of their average.
mu_z is the initial head (update="body"), or learnt (update="full"): the mean by size of the
clients' posterior means, the M-step of the population model. s is 0.1 and not 1 as in the authors'
code: the data leave most directions of a head open. There the noise makes z_i deviate by s, and the
larger s is, the less does the body fit mu_z, the head of a client that never took part.

Global prediction: a client that took part uses its own kept heads, which it remembers; any other
the population's mean mu_z. So the global prediction is a personal one, but for clients that never
took part.
Personalisation: the client update itself; the prediction is the mean over the kept heads.
Sent: d down, d up, d being the body.

What differs from the authors' code: the noise is really added (RMSprop without noise there).
Clients work in parallel on the same theta and are averaged, instead of changing it one after
another. Minibatches instead of full-batch steps; SGD instead of Adam; a prior around the initial
head instead of N(0, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Personalised, Problem
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.toolbox import mixture_prediction, repeat, start_weights, uniform
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.network.vectors import Weights
from fedhb.seeding import Randomness, derive
from fedhb.settings_fields import setting
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd


@dataclass(frozen=True)
class FedPop(FedAvg):
    """A common body under heads that are sampled."""

    name: ClassVar[str] = "fedpop"
    keeps: ClassVar[str] = "heads"
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.1,
        "momentum": 0.9,
        "personal_lr": 0.01,
        "personal_epochs": 5,
    }
    update: str = setting(
        "full",
        "what is trained: body, or full (body and the mean mu_z of the heads)",
        choices=("body", "full"),
    )
    prior_scale: float = setting(
        0.1, "s: deviation of the clients' heads around mu_z", positive=True
    )
    head_epochs: int = setting(4, "epochs of a chain", positive=True)
    burn_in: float = setting(0.5, "share of a chain that is dropped", least=0.0, most=1.0)
    num_heads: int = setting(5, "heads kept of a chain", positive=True)
    noise: float = setting(
        1.0, "multiplies the chain's noise: 1 samples the posterior, 0 only climbs", least=0.0
    )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return the initial network."""
        if not len(problem.network.head):
            raise InputError(
                "fedpop samples the head, and this network has none: name one with head=..."
            )
        return super().start(problem, rng)

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember the kept heads [C, M, h]; `seen` is 0 before a client's first round."""
        heads = repeat(problem.network.head, self.num_heads)
        return {"heads": heads.repeat(len(clients), 1, 1), "seen": heads.new_zeros(len(clients), 1)}

    def sample_and_fit(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Weights, Tensor, Arrays]:
        """Sample heads under the received body, then train it under the kept heads [C, M, h]."""
        start = start_weights(problem, received["theta"], received, len(clients))
        mean = start.head[0].clone()
        start.head = torch.where(memory["seen"].bool(), memory["heads"][:, -1], start.head)
        heads = self.chain(problem, start, mean, clients, plan, rng)
        solver = Sgd(problem.network, start, replace(plan, train_head=False))
        positions = torch.arange(len(clients))
        generators = [rng(i, "heads") for i in clients.ids.tolist()]
        for batch in batches(clients, plan, rng, merge_single=problem.network.has_batch_norm):
            for c in positions[batch.active].tolist():
                j = int(torch.randint(self.num_heads, (), generator=generators[c]))
                start.head[c] = heads[c, j]
            solver.step(batch, problem.likelihood)
        return start, heads, solver.report() | {"examples": clients.sizes.double()}

    def chain(
        self,
        problem: Problem,
        start: Weights,
        mean: Tensor,
        clients: Clients,
        plan: Plan,
        rng: Randomness,
    ) -> Tensor:
        """Sample heads by Langevin steps from `start` on; return the kept ones [C, M, h].

        The bodies are fixed, and the prior is around mean [h].
        """
        plan = replace(plan, epochs=self.head_epochs, train_head=True)
        merge = problem.network.has_batch_norm
        z, sizes = start.head.clone(), clients.sizes.to(start.head).unsqueeze(1)
        solver = Sgd(problem.network, Weights(start.theta, z, start.buffers.clone()), plan)
        # lr mu of the penalty mu/2 ||z - mean||^2 per example
        pull = plan.lr / (self.prior_scale**2 * sizes)
        deviation = self.noise * (2.0 * plan.lr / sizes).sqrt()
        lengths = [
            plan.epochs * ((n - 1 - merge) // plan.batch_size + 1) for n in clients.sizes.tolist()
        ]
        positions = torch.arange(len(clients))
        generators = [rng(i, "langevin") for i in clients.ids.tolist()]
        heads, done = z.unsqueeze(1).repeat(1, self.num_heads, 1), [0] * len(clients)
        # batches in another order than the body's
        chain_rng = replace(rng, seed=derive(rng.seed, "chain"))
        for batch in batches(clients, plan, chain_rng, merge_single=merge):
            active, rows = batch.active, positions[batch.active].tolist()
            _, gradient = solver.gradients(batch, problem.likelihood, body=False)
            assert gradient is not None
            draws = [
                torch.randn(len(mean), generator=generators[c], dtype=torch.float32) for c in rows
            ]
            noise = torch.stack(draws).to(z)
            moved = z[active] - plan.lr * gradient + deviation[active] * noise
            z[active] = (moved + pull[active] * mean) / (1.0 + pull[active])
            for c in rows:
                dropped = min(int(self.burn_in * lengths[c]), lengths[c] - 1)
                place = max(0, done[c] - dropped) * self.num_heads // (lengths[c] - dropped)
                heads[c, place:] = z[c]  # until a later iterate takes its place
                done[c] += 1
        return heads

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return theta_i, and the mean of z_i where mu_z is learnt; clients keep the heads."""
        weights, heads, reports = self.sample_and_fit(problem, received, clients, memory, plan, rng)
        weights.head = heads.mean(1)
        answers = {key: getattr(weights, key) for key in received}
        return answers | reports, {"heads": heads, "seen": torch.ones_like(memory["seen"])}

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the mean prediction of a client's remembered heads, or that of the head mu_z."""
        remembered = memory is not None and bool(memory["seen"].all())
        count = self.num_heads if remembered else 1
        weights = start_weights(problem, server["theta"], server, count)
        if memory is not None and remembered:
            weights.head = memory["heads"][0]
        return mixture_prediction(problem, weights, uniform(count, x, problem.network.dtype), x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Do the client update, from the client's own head if it has one.

        The prediction is the mean over the kept heads.
        """
        received = self.broadcast(server, clients.ids.tolist())
        weights, heads, _ = self.sample_and_fit(problem, received, clients, memory, plan, rng)
        theta, buffers = (
            vector.unsqueeze(1).expand(-1, self.num_heads, -1)
            for vector in (weights.theta, weights.buffers)
        )
        shares = heads.new_full(heads.shape[:2], 1.0 / self.num_heads)
        return Personalised(problem, theta, heads, buffers, shares)
