"""FedBE (Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning",
ICLR 2021).

    each round, clients i in the cohort find theta_i by SGD from theta
    mean <- their FedAvg average
    teachers <- mean, and S networks sampled from a posterior over global models that the theta_i
                stand for:
        gaussian    theta + length (u + spread s z), z ~ N(0, I); tensor by tensor, u and s^2 are
                    the mean and variance over clients of the unit vectors
                    (theta_i - theta) / ||theta_i - theta||, and length the mean of the norms
        dirichlet   sum_i g_i |D_i| theta_i / sum_i g_i |D_i|, g_i ~ Gamma(alpha)
    p(x) <- the mean of the teachers' predictions for the server's unlabelled inputs x,
            sharpened: p^(1/temperature), normalised
    theta <- SGD from mean on KL(p || student), its iterates averaged (SWA)

Both posteriors come from sums over clients (u, s, lengths; or g_is theta_i for each sample s), so
the server's memory is O(S d) whatever the cohort. The student is sent, and predicts; clients
personalise by fine-tuning it. Without server inputs there is nothing to distil on: theta is the
FedAvg mean, and the teachers, kept by the server, predict as an ensemble.
Real targets: p is the mixture's mean and variance; sharpening multiplies the variance by the
temperature.
Sent: d down, d up (dirichlet: and the S weights that a client draws).

What differs from the authors' code: 1 epoch of distillation a round, not 20, because clients train
for 1 epoch, not 20; so SWA averages all iterates after 30 % of the steps, not every 25th after 500.
The loss is summed over classes, theirs is the mean: server_lr 1e-4 is their 1e-3 for ten classes.
No weight decay (theirs 1e-5). Batch norm's buffers are the average's, then the student's own, and
never sampled, which could make variances negative. A tensor that no client moved stays (theirs:
0 / 0). Dirichlet weights count |D_i|, as the FedAvg mean does; theirs do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Kind, NonNegative, Problem
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.toolbox import SHARED, differences, mixture_prediction, start_weights, uniform
from fedhb.clients.clients import Clients, Share
from fedhb.distributions import chi_square
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Slot, Weights
from fedhb.seeding import SERVER, Randomness
from fedhb.settings_fields import setting
from fedhb.training.average import Iterates
from fedhb.training.plan import Plan
from fedhb.training.sgd import train

FLOOR = 1e-5
"""The least variance of a coordinate of the clients' unit vectors, as in the authors' code."""
INPUTS_AT_ONCE = 1024
"""Server inputs that teachers predict at once."""


@dataclass(frozen=True)
class FedBE(FedAvg):
    """FedAvg whose average is taught by a Bayesian ensemble of global models."""

    name: ClassVar[str] = "fedbe"
    answer: ClassVar[Mapping[str, Kind]] = {**FedAvg.answer, "g": NonNegative()}
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    posterior: str = setting(
        "gaussian", "over global models: gaussian or dirichlet", choices=("gaussian", "dirichlet")
    )
    num_components: int = setting(
        3, "S, teachers sampled in a round, beside the FedAvg mean", positive=True
    )
    spread: float = setting(0.3, "scales the deviation of the gaussian posterior", least=0.0)
    alpha: float = setting(
        1.0, "concentration of the dirichlet posterior; large is the FedAvg mean", positive=True
    )
    temperature: float = setting(
        0.5, "sharpens the teachers' mean prediction; 1 leaves it", positive=True
    )
    distill_epochs: int = setting(
        1, "epochs of distillation a round; 0 sends the FedAvg mean", least=0
    )
    server_lr: float = setting(1e-4, "learning rate of distillation", positive=True)
    server_momentum: float = setting(0.9, "momentum of distillation", least=0.0, most=1.0)
    server_batch_size: int = setting(128, "server inputs per minibatch", positive=True)
    swa_start: float = setting(
        0.3, "share of distillation before iterates are averaged; 1: the last", least=0.0, most=1.0
    )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return the initial network; it is every teacher where there is nothing to distil on."""
        server = super().start(problem, rng)
        if problem.federation.server_inputs is not None:
            return server
        warnings.warn(
            "fedbe has no server inputs to distil on, so its teachers predict as an ensemble and "
            "clients train from the FedAvg mean: for distillation set aside unlabelled examples, "
            "such as --server-share 0.1",
            stacklevel=2,
        )
        return server | {
            f"{key}_teachers": server[key].expand(self.num_components, -1).clone()
            for key in trained(server)
        }

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send theta, and the head where it is trained; no teachers."""
        return {key: server[key] for key in ("theta", *SHARED) if key in server}

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Return theta_i as in FedAvg; for the dirichlet posterior also g_i [C, S]."""
        answers, memory = super().local_update(problem, received, clients, memory, plan, rng)
        if self.posterior == "dirichlet":
            # a Gamma(alpha) variable is half a chi-square one; only ratios count
            draws = [
                chi_square(2.0 * self.alpha, (self.num_components,), rng(i, "dirichlet"))
                for i in clients.ids.tolist()
            ]
            # in float64: a small alpha gives tiny numbers
            answers["g"] = torch.stack(draws).to(problem.network.device)
        return answers, memory

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return FedAvg's sums, and those of the posterior.

        They are sums of unit vectors, of their squares and of the norms, or of theta_i under each
        sample's weights.
        """
        sums = super().summarise(problem, received, answers, rng)
        if self.posterior == "dirichlet":
            g = answers["g"]  # [C, S]
            g = g * self.weight(answers).to(g.device).unsqueeze(1)
            sums["g"] = g.sum(0)
            for key in trained(received):
                theta = answers[key].double()
                samples = [differences(theta, received[key], g_s) for g_s in g.T]
                sums[f"{key}_samples"] = torch.stack(samples)
            return sums
        for key in trained(received):
            moments = unit_moments(answers[key], received[key], slots(problem, key))
            names = (f"{key}_unit", f"{key}_square", f"{key}_length")
            sums |= dict(zip(names, moments, strict=True))
        return sums

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the taught FedAvg mean; without server inputs, the mean and its teachers."""
        mean = super().aggregate(problem, server, summary, rng)
        teachers = self.teachers(problem, server, summary, rng)
        if problem.federation.server_inputs is None:
            return mean | {f"{key}_teachers": value for key, value in teachers.items()}
        return self.distil(problem, mean, teachers, rng) if self.distill_epochs else mean

    def teachers(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Sample S networks from the posterior: theta [S, d], and a trained head [S, h]."""
        generator, teachers = rng(SERVER, "teachers"), {}
        for key in trained(server):
            reference = server[key].double()
            if self.posterior == "dirichlet":
                change = summary[f"{key}_samples"] / summary["g"].unsqueeze(1)
            else:
                unit, square, length = (
                    summary[f"{key}_{name}"] / summary["count"]
                    for name in ("unit", "square", "length")
                )
                deviation = (square - unit.square()).clamp_min_(FLOOR).sqrt_()
                shape = (self.num_components, len(reference))
                z = torch.randn(shape, generator=generator, dtype=torch.float32).to(reference)
                change = z.mul_(self.spread * deviation).add_(unit)
                for slot, norm in zip(slots(problem, key), length, strict=True):
                    change[:, slot.start : slot.stop] *= norm
            teachers[key] = (reference + change).to(server[key].dtype)
        return teachers

    def ensemble(self, problem: Problem, mean: Arrays, teachers: Arrays) -> Weights:
        """Return the teachers as networks: the FedAvg mean first, all with its buffers."""
        weights = start_weights(problem, mean["theta"], mean, 1 + self.num_components)
        for key, value in teachers.items():
            getattr(weights, key)[1:] = value
        return weights

    def distil(self, problem: Problem, mean: Arrays, teachers: Arrays, rng: Randomness) -> Arrays:
        """Return the student: SGD from the mean on the teachers' sharpened predictions.

        Its iterates are averaged.
        """
        assert problem.federation.server_inputs is not None
        x = problem.federation.server_inputs.to(problem.network.device)
        ensemble = self.ensemble(problem, mean, teachers)
        targets = sharpen(predictions(problem, ensemble, x), self.temperature)
        share = Share(x, targets, rows=torch.arange(len(x)), offsets=torch.tensor([0, len(x)]))
        start = start_weights(problem, mean["theta"], mean, 1)
        examples = [self.distill_epochs * len(x)]
        iterates = Iterates(start, "head" in mean, examples, self.swa_start, 1)
        plan = Plan(
            self.distill_epochs,
            self.server_batch_size,
            self.server_lr,
            self.server_momentum,
            "head" in mean,
        )
        # training asks for loss and score alone
        student = cast(Likelihood, Soft(problem.likelihood))
        server = Clients(ids=torch.tensor([SERVER]), train=share)
        weights, _ = train(problem.network, student, start, server, plan, rng, beside=iterates)
        keys = trained(mean)
        averages = iterates.averages(0)[0].split([len(mean[key]) for key in keys])
        buffers = {"buffers": weights.buffers[0]} if "buffers" in mean else {}
        return dict(zip(keys, averages, strict=True)) | buffers

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the student's prediction, or the mean of the teachers' where there is none."""
        if "theta_teachers" not in server:
            return super().predict(problem, server, x, rng, memory)
        teachers = {key: server[f"{key}_teachers"] for key in trained(server)}
        weights = self.ensemble(problem, server, teachers)
        shares = uniform(len(weights.theta), x, problem.network.dtype)
        return mixture_prediction(problem, weights, shares, x)

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return whether the round's mean was taught."""
        inputs = problem.federation.server_inputs
        return {"distilled": inputs is not None and self.distill_epochs > 0}


def trained(arrays: Arrays) -> list[str]:
    """Return which of theta and head are trained."""
    return [key for key in ("theta", "head") if key in arrays]


def slots(problem: Problem, key: str) -> tuple[Slot, ...]:
    """Return the places of the tensors of the body or of the head."""
    return problem.network.body_slots if key == "theta" else problem.network.head_slots


def unit_moments(
    vectors: Tensor, reference: Tensor, slots: Sequence[Slot]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over clients of unit vectors [k], their squares [k], and the norms [slots].

    Tensor by tensor, a unit vector is (vectors_i - reference) / norm.
    """
    reference = reference.double()
    unit, square = torch.zeros_like(reference), torch.zeros_like(reference)
    lengths = reference.new_zeros(len(slots))
    for vector in vectors:
        difference = vector - reference  # in float64, for vectors of any type
        norms = torch.stack([difference[slot.start : slot.stop].norm() for slot in slots])
        for slot, norm in zip(slots, norms.clamp_min(torch.finfo(torch.float64).tiny), strict=True):
            difference[slot.start : slot.stop] /= norm
        unit += difference
        square.addcmul_(difference, difference)
        lengths += norms
    return unit, square, lengths


def predictions(problem: Problem, weights: Weights, x: Tensor) -> Tensor:
    """Return the mean prediction of M networks for x [n, ...].

    One network and block of inputs is evaluated at a time.
    """
    network, M = problem.network, len(weights.theta)
    means = []
    for block in [x] if network.normalises_by_batch else x.split(INPUTS_AT_ONCE):
        each = []
        for j in range(M):
            row = slice(j, j + 1)
            teacher = Weights(weights.theta[row], weights.head[row], weights.buffers[row])
            outputs = network.outputs(teacher, block.unsqueeze(0))[0]
            each.append(problem.likelihood.predictive(outputs))
        shares = uniform(M, block, network.dtype)
        means.append(problem.likelihood.average(torch.stack(each), shares))
    return torch.cat(means)


def sharpen(prediction: Tensor, temperature: float) -> Tensor:
    """Return p^(1/temperature), normalised.

    p are probabilities [n, classes], or mean and variance [n, 2, q] of a normal density.
    """
    if prediction.ndim == 2:
        logarithm = prediction.clamp_min(torch.finfo(prediction.dtype).tiny).log()
        return (logarithm / temperature).softmax(-1)
    return torch.stack([prediction[:, 0], temperature * prediction[:, 1]], dim=1)


@dataclass(frozen=True)
class Soft:
    """A likelihood whose targets are predictions.

    They are class probabilities [C, B, classes], or mean and variance [C, B, 2, q].
    """

    likelihood: Likelihood

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the expected loss: KL(prediction || network) up to a constant."""
        if y.ndim == outputs.ndim:
            return -(y * outputs.log_softmax(-1)).sum(-1)
        mean, deviation = y[..., 0, :], y[..., 1, :].sqrt()
        # two points are exact for a loss that is quadratic in the target
        below = self.likelihood.loss(outputs, mean - deviation)
        return 0.5 * (below + self.likelihood.loss(outputs, mean + deviation))

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether the likeliest class is the teachers', or the squared error."""
        if y.ndim == outputs.ndim:
            return (outputs.argmax(-1) == y.argmax(-1)).to(outputs.dtype)
        return self.likelihood.score(outputs, y[..., 0, :].contiguous())
