"""The likelihood p(y | x, theta) given a network's outputs, and the metrics of predictions.

A *prediction* summarises the predictive distribution: class probabilities [..., classes], or the
mean and the variance of a real target [..., 2, q]. `average` mixes the predictions of several
networks.
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
    """The methods of a likelihood that algorithms use."""

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of the network."""
        ...

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return -log p(y | x, theta) per example [C, B].

        Outputs are [C, B, out], targets [C, B, ...].
        """
        ...

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return a number per example [C, B] to watch: correct or not, or the squared error."""
        ...

    def predictive(self, outputs: Tensor) -> Tensor:
        """Return the prediction for outputs [..., out]."""
        ...

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets [B, ...] from p(y | x, theta) for outputs [B, out].

        Only a learned prior needs them.
        """
        ...

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """Mix predictions [M, ..., n, *] with weights [M, ..., n] that sum to one over M."""
        ...

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Return how well the prediction for n examples fits their targets."""
        ...


def slope(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the derivative of each example's loss in its outputs [C, B, out].

    A likelihood may have a method of this name. It is worth writing where the outputs are few, and
    autograd's bookkeeping takes longer than the derivative itself. A subclass with a loss of its
    own does not inherit the derivative.
    """
    kinds = type(likelihood).__mro__
    owners = [
        next((k for k, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("slope", "loss")
    ]
    if owners[0] <= owners[1] and owners[0] < len(kinds):
        derivative: Tensor = likelihood.slope(outputs, y)  # type: ignore[attr-defined]
        return derivative
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(likelihood.loss(outputs, y).sum(), outputs)
    return derivative


def check_sample(likelihood: Likelihood) -> None:
    """Refuse a likelihood that cannot draw targets where they are needed."""
    if not hasattr(likelihood, "sample"):
        raise InputError(
            f"{type(likelihood).__name__} has no sample(outputs, generator), which empirical-bayes "
            "needs to measure curvature: write it, or choose niw"
        )


@dataclass(frozen=True)
class Categorical:
    """Classification with a softmax link."""

    num_classes: int

    @property
    def num_outputs(self) -> int:
        """Return one logit per class."""
        return self.num_classes

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy per example."""
        flat = outputs.flatten(0, 1)
        return functional.cross_entropy(flat, y.flatten(), reduction="none").view(y.shape)

    def slope(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return p - e_y."""
        true = y.unsqueeze(-1)
        minus_one = outputs.new_full((), -1.0).expand(true.shape)
        return outputs.softmax(-1).scatter_add_(-1, true, minus_one)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return 1 where the likeliest class is the true one."""
        return (outputs.argmax(-1) == y).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a class per example; any class where the outputs are not finite."""
        p = outputs.softmax(-1).cpu().nan_to_num(1.0)
        return torch.multinomial(p, 1, generator=generator).squeeze(-1).to(outputs.device)

    def predictive(self, outputs: Tensor) -> Tensor:
        """Return class probabilities."""
        return outputs.softmax(-1)

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the probabilities (not of the logits)."""
        return (weights.unsqueeze(-1) * predictions).sum(0)

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Return accuracy, negative log-likelihood, Brier score and calibration error."""
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
    """Return the expected calibration error with bins of confidence of equal width.

    It is the sum over bins of (share of examples) |accuracy - confidence|, and equals torchmetrics'
    to rounding.
    """
    confidence, guess = probabilities.double().max(-1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are (low, high]
    gap = (guess == y).double() - confidence
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, gap)
    return sums.abs().sum().item() / max(len(y), 1)


@dataclass(frozen=True)
class GaussianRegression:
    """Regression on q real targets with normal noise.

    The network's outputs o give the mean of each target, centre + scale gain o, and the noise's
    standard deviation, scale softplus(gain o): 2q outputs. With fixed `noise` (in the target's own
    units) there are q outputs. Centre, scale and noise are each a number, or a tuple of q numbers
    where the targets have units of their own.

    The curvature of the loss in the mean is one over the noise's variance and has no bound, while
    that of the cross entropy is at most a half. So SGD leaps at the learning rates of
    classification. A smaller `gain`, which is nothing but another unit of the last layer's weights,
    shortens its steps. Slopes of residuals beyond `most` deviations are held at that of `most`.
    `fit` uses CALM where it is given no likelihood.
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
        """Return q, or 2 q where the noise is not fixed."""
        return self.num_targets * (2 if self.noise is None else 1)

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [..., q] in the target's units."""
        scale, centre = _as(outputs, self.scale), _as(outputs, self.centre)
        mean = outputs[..., : self.num_targets] * (self.gain * scale) + centre
        if self.noise is not None:
            return mean, torch.zeros_like(mean) + _as(outputs, self.noise)
        noise = functional.softplus(self.gain * outputs[..., self.num_targets :])
        return mean, scale * (noise + self.floor)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log density per example, summed over targets.

        The log of each scale is added, so that the loss is the same in every unit of y.
        """
        mean, deviation = self._moments(outputs)
        z = (y.view(mean.shape) - mean) / deviation
        log_deviation = (deviation / _as(outputs, self.scale)).log()
        return (0.5 * z.square() + log_deviation + 0.5 * math.log(2 * math.pi)).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the loss, with |z| at most `most`.

        It is gain (-z scale / s) for the mean, and gain (1 - z^2) softplus' / (s / scale) for the
        noise.
        """
        mean, deviation = self._moments(outputs)
        scale = _as(outputs, self.scale)
        z = (y.view(mean.shape) - mean) / deviation
        z = z if self.most is None else z.clamp_(-self.most, self.most)
        for_mean = -self.gain * z * scale / deviation
        if self.noise is not None:
            return for_mean
        rise = torch.sigmoid(self.gain * outputs[..., self.num_targets :])
        for_noise = self.gain * (1.0 - z.square()) * rise * scale / deviation
        return torch.cat([for_mean, for_noise], -1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the squared error."""
        mean, _ = self._moments(outputs)
        return (y.view(mean.shape) - mean).square().mean(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets [..., q]."""
        mean, deviation = self._moments(outputs)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        return mean + deviation * noise.to(mean.device)

    def predictive(self, outputs: Tensor) -> Tensor:
        """Return mean and variance [..., 2, q]."""
        mean, deviation = self._moments(outputs)
        return torch.stack([mean, deviation.square()], dim=-2)

    def average(self, predictions: Tensor, weights: Tensor) -> Tensor:
        """Return mean and variance of the mixture: E m, and E(v + m^2) - (E m)^2."""
        w = weights.unsqueeze(-1)
        mean = (w * predictions[..., 0, :]).sum(0)
        variance = (w * (predictions[..., 1, :] + (predictions[..., 0, :] - mean).square())).sum(0)
        return torch.stack([mean, variance], dim=-2)

    def metrics(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Return root mean squared error, negative log-likelihood, and coverage.

        Coverage is how often the central 90 % interval holds the target. The errors of all targets
        are taken together, each in its own units: the RMSE is mostly that of the largest.
        """
        prediction, y = prediction.double().cpu(), y.cpu()
        mean, variance = prediction[..., 0, :], prediction[..., 1, :]
        error = y.double().view(mean.shape) - mean
        quantile = torch.tensor(0.5 + self.level / 2, dtype=torch.float64)
        half = torch.distributions.Normal(0.0, 1.0).icdf(quantile)
        nll = 0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)
        return {
            "rmse": error.square().mean().sqrt().item(),
            "nll": nll.mean().item(),
            "coverage": (error.abs() <= half * variance.sqrt()).double().mean().item(),
        }


CALM = {"gain": 0.2, "most": 5.0}
"""The gain and bound with which regression trains at the learning rates of classification
(experiments/regression)."""


def per_target(values: Sequence[float]) -> PerTarget:
    """Return one number for each target; for a single target, the number itself."""
    return values[0] if len(values) == 1 else tuple(values)


def _as(outputs: Tensor, value: PerTarget) -> float | Tensor:
    """Return the number, or the targets' numbers as a tensor [q] like the outputs."""
    if isinstance(value, tuple):
        return torch.tensor(value, dtype=outputs.dtype, device=outputs.device)
    return value


def _check(name: str, given: Any, count: int, *, positive: bool) -> None:
    """Refuse a value that is neither a finite number nor one for each target."""
    values = given if isinstance(given, Sequence) else [given]
    try:
        valid = all(math.isfinite(v) and (v > 0 or not positive) for v in values)
    except (TypeError, OverflowError):
        valid = False
    if not valid or (values is given and len(values) != count):
        kind = "positive number" if positive else "finite number"
        raise InputError(
            f"{name}={given!r} with num_targets={count}: give a {kind}, or a tuple of one for each "
            "target"
        )
