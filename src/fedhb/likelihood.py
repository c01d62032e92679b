"""p(y | x, theta) given the network's outputs, and how well predictions fit: accuracy and calibration, or error and coverage.

A *prediction* is what the predictive distribution is summarised by: class probabilities [..., classes], or the mean and the
variance of a real target [..., 2, q]. `average` mixes the predictions of several networks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedhb.errors import InputError

PerTarget = float | tuple[float, ...]
"""One number for all targets, or one for each."""


class Likelihood(Protocol):
    """What the algorithms need of a likelihood."""

    @property
    def num_outputs(self) -> int:
        """How many outputs the network has."""
        ...

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """-log p(y | x, theta) per example [C, B] for outputs [C, B, out] and targets [C, B, ...]."""
        ...

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """A number per example [C, B] to watch during training: correct or not, or the squared error."""
        ...

    def predictive(self, outputs: Tensor) -> Tensor:
        """The prediction for outputs [..., out]."""
        ...

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Targets [B, ...] drawn from p(y | x, theta) for outputs [B, out]; only a prior that is learned asks for them."""
        ...

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """The mixture of predictions [M, ..., n, *] with weights [M, ..., n] that sum to one over M."""
        ...

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """How well the prediction for n examples fits their targets."""
        ...


def slope(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """The derivative of each example's loss in its outputs [C, B, out].

    By the likelihood's own method of this name where it has one; it is worth writing where the outputs are few and autograd's
    bookkeeping takes longer than the derivative itself. A subclass with a loss of its own does not inherit the derivative.
    """
    kinds = type(likelihood).__mro__
    owners = [
        next((k for k, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("slope", "loss")
    ]
    if owners[0] <= owners[1] and owners[0] < len(kinds):
        found: Tensor = likelihood.slope(outputs, y)  # type: ignore[attr-defined]
        return found
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        (found,) = torch.autograd.grad(likelihood.loss(outputs, y).sum(), outputs)
    return found


def check_sample(likelihood: Likelihood) -> None:
    """Refuse a likelihood that cannot draw targets where they are needed."""
    if not hasattr(likelihood, "sample"):
        raise InputError(
            f"{type(likelihood).__name__} has no sample(outputs, generator), which a learned prior needs: "
            "write it, or choose dof=full or per_coordinate"
        )


@dataclass(frozen=True)
class Categorical:
    """Classification with a softmax link."""

    num_classes: int

    @property
    def num_outputs(self) -> int:
        """One logit per class."""
        return self.num_classes

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross entropy per example."""
        return functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(
            y.shape
        )

    def slope(self, outputs: Tensor, y: Tensor) -> Tensor:
        """p - e_y."""
        true = y.unsqueeze(-1)
        return outputs.softmax(-1).scatter_add_(
            -1, true, outputs.new_full((), -1.0).expand(true.shape)
        )

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One where the likeliest class is the true one."""
        return (outputs.argmax(-1) == y).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """A class per example; any where the outputs are not finite."""
        p = outputs.softmax(-1).cpu().nan_to_num(1.0)
        return torch.multinomial(p, 1, generator=generator).squeeze(-1).to(outputs.device)

    def predictive(self, outputs: Tensor) -> Tensor:
        """Class probabilities."""
        return outputs.softmax(-1)

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """The mean of the probabilities (not of the logits)."""
        return (weights.unsqueeze(-1) * predictions).sum(0)

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Accuracy, negative log-likelihood, Brier score and expected calibration error."""
        p, y = prediction.double().cpu(), y.cpu()
        truth = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        one_hot = functional.one_hot(y, p.shape[-1])
        return {
            "accuracy": (p.argmax(-1) == y).double().mean().item(),
            "nll": -truth.clamp_min(torch.finfo(torch.float32).tiny).log().mean().item(),
            "brier": (p - one_hot).square().sum(-1).mean().item(),
            "ece": calibration_error(p, y),
        }


def calibration_error(probabilities: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error with equal-width bins of confidence: sum over bins of (share) |accuracy - confidence|.

    Fifteen lines replace a dependency: the value equals torchmetrics' to rounding (tests/test_likelihood.py has the definition).
    """
    confidence, guess = probabilities.double().max(-1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are (low, high]
    gap = (guess == y).double() - confidence
    return torch.zeros(bins, dtype=torch.float64).index_add_(
        0, index, gap
    ).abs().sum().item() / max(len(y), 1)


@dataclass(frozen=True)
class GaussianRegression:
    """Regression on q real targets with normal noise.

    The network's outputs, times `gain`, are in units of `scale` around `centre` the mean of each target and, unless `noise` fixes
    it, the noise's standard deviation through a softplus: 2q outputs, or q with fixed `noise` (in the target's own units).
    Centre, scale and noise are each a number, or a tuple of q numbers where the targets have units of their own.

    The curvature of the loss in the mean is one over the noise's variance, without a bound, where that of the cross entropy is
    at most a half: at the learning rates of classification SGD leaps. A smaller `gain`, which is nothing but another unit of the
    last layer's weights, shortens its steps, and slopes of residuals beyond `most` deviations are held at that of `most`. `fit`
    takes CALM, where it is given no likelihood.
    """

    num_targets: int = 1
    centre: PerTarget = 0.0
    scale: PerTarget = 1.0
    noise: PerTarget | None = None
    gain: float = 1.0
    most: float | None = None

    floor = 1e-3  # of the scale: keeps a perfectly fitted target from an infinite likelihood
    level = 0.9  # of the intervals whose coverage is reported

    def __post_init__(self) -> None:
        if not self.num_targets >= 1:
            raise InputError(f"num_targets={self.num_targets}: give at least one")
        for name in ("centre", "scale", "noise"):
            given = getattr(self, name)
            if isinstance(given, Sequence) and not isinstance(given, str):  # JSON has lists
                object.__setattr__(self, name, tuple(given))
            if given is not None or name != "noise":
                _check(name, given, self.num_targets, positive=name != "centre")
        for name in ("gain", "most"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, positive=True)

    @property
    def num_outputs(self) -> int:
        """Mean and noise of each target, or the mean alone where the noise is fixed."""
        return self.num_targets * (2 if self.noise is None else 1)

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [..., q] in the target's units."""
        scale = _beside(self.scale, outputs)
        mean = outputs[..., : self.num_targets] * (self.gain * scale) + _beside(
            self.centre, outputs
        )
        if self.noise is not None:
            return mean, torch.zeros_like(mean) + _beside(self.noise, outputs)
        return mean, scale * (
            functional.softplus(self.gain * outputs[..., self.num_targets :]) + self.floor
        )

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log density per example, summed over targets, plus the log of each scale: the same loss in every unit of y."""
        mean, deviation = self._moments(outputs)
        z = (y.view(mean.shape) - mean) / deviation
        return (
            0.5 * z.square()
            + (deviation / _beside(self.scale, outputs)).log()
            + 0.5 * math.log(2 * math.pi)
        ).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor) -> Tensor:
        """gain (-z scale / s) for the mean, gain (1 - z^2) softplus' / (s / scale) for the noise, |z| at most `most`."""
        mean, deviation = self._moments(outputs)
        scale = _beside(self.scale, outputs)
        z = (y.view(mean.shape) - mean) / deviation
        z = z if self.most is None else z.clamp_(-self.most, self.most)
        found = -self.gain * z * scale / deviation
        if self.noise is not None:
            return found
        rise = torch.sigmoid(self.gain * outputs[..., self.num_targets :])
        return torch.cat([found, self.gain * (1.0 - z.square()) * rise * scale / deviation], -1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Squared error."""
        mean, _ = self._moments(outputs)
        return (y.view(mean.shape) - mean).square().mean(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Targets [..., q]."""
        mean, deviation = self._moments(outputs)
        return mean + deviation * torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(
            mean.device
        )

    def predictive(self, outputs: Tensor) -> Tensor:
        """Mean and variance [..., 2, q]."""
        mean, deviation = self._moments(outputs)
        return torch.stack([mean, deviation.square()], dim=-2)

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """Mean and variance of the mixture: E m, and E(v + m^2) - (E m)^2."""
        w = weights.unsqueeze(-1)
        mean = (w * predictions[..., 0, :]).sum(0)
        variance = (w * (predictions[..., 1, :] + (predictions[..., 0, :] - mean).square())).sum(0)
        return torch.stack([mean, variance], dim=-2)

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Root mean squared error, negative log-likelihood, and how often the central 90 % interval holds the target.

        The errors of all targets are taken together, each in its own units: the RMSE is mostly that of the largest.
        """
        prediction, y = prediction.double().cpu(), y.cpu()
        mean, variance = prediction[..., 0, :], prediction[..., 1, :]
        error = y.double().view(mean.shape) - mean
        half = torch.distributions.Normal(0.0, 1.0).icdf(
            torch.tensor(0.5 + self.level / 2, dtype=torch.float64)
        )
        nll = 0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)
        return {
            "rmse": error.square().mean().sqrt().item(),
            "nll": nll.mean().item(),
            "coverage": (error.abs() <= half * variance.sqrt()).double().mean().item(),
        }


CALM = {"gain": 0.2, "most": 5.0}
"""With which regression trains at the learning rates of classification (experiments/regression)."""


def per_target(values: Sequence[float]) -> PerTarget:
    """One number of each target; of a single target, the number itself."""
    return values[0] if len(values) == 1 else tuple(values)


def _beside(value: PerTarget, outputs: Tensor) -> float | Tensor:
    """The number, or the targets' numbers as a tensor [q] of the outputs' kind."""
    return (
        torch.tensor(value, dtype=outputs.dtype, device=outputs.device)
        if isinstance(value, tuple)
        else value
    )


def _check(name: str, given: Any, count: int, *, positive: bool) -> None:
    """Refuse what is neither a finite number nor one for each target."""
    values = given if isinstance(given, Sequence) else [given]
    try:
        right = all(math.isfinite(v) and (v > 0 or not positive) for v in values)
    except (TypeError, OverflowError):
        right = False
    if not right or (values is given and len(values) != count):
        kind = "positive number" if positive else "finite number"
        raise InputError(
            f"{name}={given!r} with num_targets={count}: give a {kind}, or a tuple of one for each target"
        )
