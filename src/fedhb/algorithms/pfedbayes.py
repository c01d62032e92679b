"""pFedBayes (Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference",
ICML 2022).

    each round, the server sends w = N(mu, sigma^2), sigma = softplus(rho), to clients i
        q_i = N(mu_i, sigma_i^2) <- w, moved by what q_i and w of client i differed by at the end of
                                    its last round, in mu and rho
        for every minibatch of tau epochs, with theta = mu_i + sigma_i noise, noise ~ N(0, I):
            step of q_i on E[mean loss at theta] + zeta KL(q_i || w) / |D_i|
            step of w   on zeta KL(q_i || w) / |D_i|
    (mu, rho) <- sum_i |D_i| (mu, rho of client i's w) / sum_i |D_i|

Per coordinate, KL(q || w) = log(sigma_w / sigma_q)
                             + (sigma_q^2 + (mu_q - mu_w)^2) / (2 sigma_w^2) - 1/2.
Global prediction: networks sampled from w. Personal: from q_i, after the same update with the head
trained too; a head that was not sent has no prior and is pulled nowhere. Clients remember q_i - w.
Sent: 2d down (mu, rho), 2d up.

The steps are SGD with momentum. The means are held together by k = zeta / (|D_i| sigma_w^2), which
is stiff where |D_i| is small. So it acts implicitly (as in training/proximal.py), and in this
order: the loss moves mu_i, w's mean follows, mu_i is pulled back:

    mu_i' = mu_i - lr v
    mu_w+ = (mu_w' + lr k mu_i') / (1 + lr k)
    mu_i+ = (mu_i' + lr k mu_w+) / (1 + lr k)

For large zeta q_i and w are one and train as FedAvg does; for zeta = 0, q_i is tuned alone and w
stays. Were q_i pulled first, w would go lr k / (1 + lr k)^2 of a step of SGD, nothing for large k.
Clients remember q_i - w, not q_i, because w has moved on since their last round, and an old q_i
would pull it back. In rho the KL is not stiff; there q_i's step is first.

What differs from the public code (unofficial): noise N(0, 1), not N(0, 0.001^2). The KL is divided
by |D_i|, as in the paper, not by the number of local steps. SGD, not Adam, whose steps do not
depend on k and whose moments outlive the weights. One step of q_i for each of w, not 5. q_i - w is
remembered, not q_i. rho0 is -6, not -3: real noise must be below the weights' own scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhb.algorithms.contract import AlgorithmBase, Arrays, Kind, Personalised, Problem, Vector
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
from fedhb.distributions import total
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.batches import batches
from fedhb.training.plan import Plan
from fedhb.training.proximal import COORDINATES_AT_ONCE
from fedhb.training.sgd import Sgd

NAMES = {"theta": ("mu", "rho"), "head": ("head", "head_rho")}
"""The keys of mean and rho of the body, and of the head, in what is sent and remembered."""


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
        """Return w around the initial network."""
        theta, shared = problem.network.theta, shared_parts(problem, self.update)
        server = {"mu": theta.clone(), "rho": torch.full_like(theta, self.rho0), **shared}
        if "head" in shared:
            server["head_rho"] = torch.full_like(shared["head"], self.rho0)
        return server

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember q_i - w, which is zero before a client's first round."""
        initial = self.start(problem, Randomness(0))
        return {
            key: repeat(torch.zeros_like(value), len(clients))
            for key, value in initial.items()
            if key != "buffers"
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
        """Take tau epochs of alternating steps on q_i and w.

        Returns:
            The pairs for body and head, the buffers, and the reports.
        """
        network = problem.network
        sample = start_weights(problem, received["mu"], received, len(clients))
        solver = Sgd(network, sample, plan)
        pairs = {
            key: self.pair(problem, received, clients, memory, plan, key)
            for key in NAMES
            if key == "theta" or solver.train_head
        }
        positions = torch.arange(len(clients))
        generators = [rng(i, "weights") for i in clients.ids.tolist()]
        for batch in batches(clients, plan, rng, merge_single=network.has_batch_norm):
            active = [generators[c] for c in positions[batch.active].tolist()]
            for key, pair in pairs.items():
                getattr(sample, key)[batch.active] = pair.draw(batch.active, active)
            gradients = solver.gradients(batch, problem.likelihood)
            for pair, gradient in zip(pairs.values(), gradients, strict=False):
                assert gradient is not None
                pair.step(batch.active, gradient)
        kl = sum(pair.kl() for key, pair in pairs.items() if NAMES[key][0] in received)
        reports = {"examples": clients.sizes.double(), "kl": torch.as_tensor(kl)}
        return pairs, sample.buffers, solver.report() | reports

    def pair(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        key: str,
    ) -> Pair:
        """Return q_i and w of the body or the head at their start.

        A head that was not sent has no KL term.
        """
        mean, rho = NAMES[key]
        mu = received.get(mean, getattr(problem.network, key))
        starts = (mu, received.get(rho, torch.full_like(mu, self.rho0)))
        w = [repeat(start, len(clients)) for start in starts]
        q = [
            start + memory[name] if name in memory else start
            for name, start in zip((mean, rho), w, strict=True)
        ]
        strength = (self.zeta if mean in received else 0.0) / clients.sizes.to(mu).unsqueeze(1)
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
        """Return the clients' w; they keep how their q_i differ from it."""
        pairs, buffers, reports = self.fit(problem, received, clients, memory, plan, rng)
        q, w = (
            {NAMES[key][j]: pair.values[k + j] for key, pair in pairs.items() for j in (0, 1)}
            for k in (0, 2)
        )
        arrays = w | {"buffers": buffers}
        answers = {key: arrays[key] for key in received}
        return answers | reports, {key: q[key] - w[key] for key in memory}

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return sum_i |D_i| (mu_i - mu), the same for rho, and sum_i |D_i|."""
        weight = answers["examples"]
        gaussians = {
            key: differences(answers[key], received[key], weight)
            for key in received
            if key not in SHARED
        }
        return gaussians | summarise_shared(answers, received, weight)

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the mean of the clients' (mu, rho) by size."""
        gaussians = {
            key: step(value, summary[key] / summary["weight"])
            for key, value in server.items()
            if key not in SHARED
        }
        return gaussians | average_shared(server, summary)

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return the mean KL(q_i || w)."""
        return {"kl": summary["kl"].item() / summary["count"].item()}

    def sample(self, mean: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
        """Draw S times N(mean, softplus(rho)^2) for mean, rho [k]: [S, k].

        With S = 0, it is the mean alone [1, k].
        """
        shape = (self.num_samples, len(mean))
        noise = torch.randn(shape, generator=generator, dtype=torch.float32).to(mean)
        return mean + spread(rho)[0] * noise if self.num_samples else mean.unsqueeze(0)

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the mean prediction of networks sampled from w."""
        generator = rng(SERVER, "predict")
        theta = self.sample(server["mu"], server["rho"], generator)
        weights = start_weights(problem, server["mu"], server, len(theta))
        weights.theta = theta
        if "head" in server:
            weights.head = self.sample(server["head"], server["head_rho"], generator)
        shares = uniform(len(theta), x, problem.network.dtype)
        return mixture_prediction(problem, weights, shares, x)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Do the client update with the head trained too; return networks sampled from q_i."""
        received = self.broadcast(server, clients.ids.tolist())
        pairs, buffers, _ = self.fit(problem, received, clients, memory, plan, rng)
        generators = [rng(i, "predict") for i in clients.ids.tolist()]
        drawn: Arrays = {}
        for key, pair in pairs.items():
            rows = zip(*pair.values[:2], generators, strict=True)
            drawn[key] = torch.stack([self.sample(mean, rho, g) for mean, rho, g in rows])
        theta = drawn["theta"]  # [C, S, d]
        count = theta.shape[1]
        if "head" not in drawn:
            fixed = start_weights(problem, received["mu"], received, len(clients)).head
            drawn["head"] = fixed.unsqueeze(1).expand(-1, count, -1)
        shares = theta.new_full(theta.shape[:2], 1.0 / count)
        buffers = buffers.unsqueeze(1).expand(-1, count, -1)
        return Personalised(problem, theta, drawn["head"], buffers, shares)


# The steps of q_i and w -----------------------------------------------------------------------


class Pair:
    """q_i and w of C clients over k coordinates, and their alternating steps.

    Args:
        values: the means and rhos of q_i and w, [4, C, k].
        strength: zeta / |D_i| [C, 1].
        plan: learning rate and momentum.
    """

    def __init__(self, values: Tensor, strength: Tensor, plan: Plan):
        self.values, self.strength, self.plan = values, strength, plan
        self.velocities = torch.zeros_like(values)
        self.noise = torch.empty_like(values[0])
        self.sigma = self.rise = values[1]  # those of the last draw

    def draw(self, active: slice | Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Draw theta ~ q_i for the active clients [A, k], each with its own generator."""
        for row, generator in zip(self.noise, generators, strict=False):
            row.copy_(torch.randn(len(row), generator=generator, dtype=torch.float32))
        mean, rho = self.values[:2, active]
        self.sigma, self.rise = spread(rho)
        return torch.addcmul(mean, self.sigma, self.noise[: len(generators)])

    def step(self, active: slice | Tensor, gradient: Tensor) -> None:
        """Take a step of q_i and one of w.

        `gradient` [A, k] is that of the mean loss at the drawn theta.
        """
        values, velocities = self.values[:, active], self.velocities[:, active]
        strength = self.strength[active]
        width = max(1, COORDINATES_AT_ONCE // len(gradient))
        for begin in range(0, gradient.shape[1], width):
            part = (..., slice(begin, begin + width))
            self._alternate(part, values[part], velocities[part], gradient[part], strength)
        if not isinstance(active, slice):
            self.values[:, active], self.velocities[:, active] = values, velocities

    def _alternate(
        self, part: Any, values: Tensor, velocities: Tensor, gradient: Tensor, strength: Tensor
    ) -> None:
        """Step on these coordinates, in the order of the module's docstring."""
        mean, rho, prior_mean, prior_rho = values
        noise, rise = self.noise[: len(gradient)][part], self.rise[part]
        prior_sigma, prior_rise = spread(prior_rho)
        slope, curvature = kl_of_q(self.sigma[part], rise, prior_sigma)
        # d theta / d rho = noise d sigma / d rho
        slope = slope.mul_(strength).add_((gradient * noise).mul_(rise))
        self._descend(rho, velocities[1], slope, curvature.mul_(strength))
        self._descend(mean, velocities[0], gradient)
        prior_mean.add_(velocities[2].mul_(self.plan.momentum), alpha=-self.plan.lr)
        # k / (1 + lr k)
        stiffness = strength / prior_sigma.square().add_(strength, alpha=self.plan.lr)
        self._pull(prior_mean, velocities[2], mean, stiffness)
        self._pull(mean, velocities[0], prior_mean, stiffness)
        slope, curvature = kl_of_w(prior_mean - mean, spread(rho)[0], prior_rise, prior_sigma)
        self._descend(prior_rho, velocities[3], slope.mul_(strength), curvature.mul_(strength))

    def _descend(
        self, value: Tensor, velocity: Tensor, slope: Tensor, curvature: Tensor | None = None
    ) -> None:
        """Take a step of SGD with momentum; a curvature damps it."""
        velocity.mul_(self.plan.momentum).add_(slope)
        if curvature is not None:
            velocity.div_(curvature.mul_(self.plan.lr).add_(1.0))
        value.add_(velocity, alpha=-self.plan.lr)

    def _pull(self, value: Tensor, velocity: Tensor, target: Tensor, stiffness: Tensor) -> None:
        """Pull a mean towards the target, in its velocity too."""
        force = (value - target).mul_(stiffness)
        velocity.add_(force)
        value.add_(force, alpha=-self.plan.lr)

    def kl(self) -> Tensor:
        """Return KL(q_i || w) [C]."""
        return torch.stack([total(kl(row)) for row in self.values.unbind(1)])


def spread(rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigma = softplus(rho) and d sigma / d rho.

    By exp and log1p: torch's softplus and sigmoid round by an element's place in its row, and so by
    which clients are trained together.
    """
    # exp would overflow beyond 80: sigma ends there, where no network is left
    e = rho.clamp(max=80.0).exp_()
    return torch.log1p(e), e / (e + 1.0)


def kl(values: Tensor) -> Tensor:
    """Return KL(q || w) of each coordinate, for the means and rhos of q and w [4, ...]."""
    mean, rho, prior_mean, prior_rho = values
    sigma, prior_sigma = spread(rho)[0], spread(prior_rho)[0]
    squares = sigma.square() + (mean - prior_mean).square()
    return (prior_sigma / sigma).log() + squares / (2 * prior_sigma.square()) - 0.5


def kl_of_q(sigma: Tensor, rise: Tensor, prior_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope of the KL in rho of q, and its curvature but for the bend of softplus.

    `rise` is d sigma_q / d rho_q.
    """
    relative = rise / sigma
    ratio = prior_sigma.pow(-2).mul_(sigma).mul_(rise)
    return ratio - relative, (ratio + relative).mul_(relative)


def kl_of_w(
    gap: Tensor, sigma: Tensor, prior_rise: Tensor, prior_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the slope of the KL in rho of w, and its curvature; gap = mu_w - mu_q.

    The curvature lacks that of the logarithm too, which is negative.
    """
    relative = prior_rise / prior_sigma
    ratio = sigma.square().addcmul_(gap, gap).div_(prior_sigma.square())
    return relative - relative * ratio, relative.square().mul_(ratio).mul_(2.0)
