"""How well predictions know their own errors: binned numbers of many examples, as lists.

reliability     accuracy against confidence, or the share of targets inside intervals
rejection       the error that is left when the least certain predictions are rejected
entropy         of predictions on familiar and on unseen inputs, as two histograms on the same bins
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhb.likelihood import Categorical, GaussianRegression, Likelihood

BINS = 15
"""Of confidence: those of the calibration error."""
ENTROPY_BINS = 24
REJECTED = np.arange(0, 100, 2.5) / 100
LEVELS = np.arange(1, 20) / 20


@dataclass(frozen=True)
class Judged:
    """Predictions for n examples, one number each.

    Attributes:
        certainty: the larger, the surer: the confidence, or minus the mean variance.
        entropy: of the predictive distribution, in nats.
        error: 1 where the class is wrong, or the mean squared error; None without targets.
        level: of regression: the probability of the smallest central interval that holds each
            target [n, q]; else None.
    """

    certainty: np.ndarray
    entropy: np.ndarray
    error: np.ndarray | None = None
    level: np.ndarray | None = None


def judge(likelihood: Likelihood, prediction: Tensor, y: Tensor | None = None) -> Judged | None:
    """Return certainty and error of predictions [n, ...]; None for a likelihood of the user's."""
    p = prediction.double().cpu()
    if isinstance(likelihood, Categorical):
        confidence, guess = p.max(-1)
        entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
        error = None if y is None else (guess != y.cpu()).double().numpy()
        return Judged(confidence.numpy(), entropy.numpy(), error)
    if isinstance(likelihood, GaussianRegression):
        mean, variance = p[..., 0, :], p[..., 1, :]
        entropy = 0.5 * (variance.log() + np.log(2 * np.pi * np.e)).sum(-1)
        certainty = (-variance.mean(-1)).numpy()
        if y is None:
            return Judged(certainty, entropy.numpy())
        gap = y.double().cpu().view(mean.shape) - mean
        level = torch.erf(gap.abs() / (2 * variance).sqrt())
        return Judged(certainty, entropy.numpy(), gap.square().mean(-1).numpy(), level.numpy())
    return None


def together(parts: list[Judged]) -> Judged:
    """Return the examples of several parts as one."""

    def column(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    return Judged(column("certainty"), column("entropy"), column("error"), column("level"))


def describe(judged: Judged) -> dict[str, Any]:
    """Return reliability and rejection of predictions whose targets are known."""
    assert judged.error is not None
    order = np.argsort(-judged.certainty, kind="stable")
    sums, n = np.cumsum(judged.error[order]), len(order)
    kept = np.maximum(1, np.round((1 - REJECTED) * n)).astype(int)
    error = sums[kept - 1] / kept
    rejection = {"rejected": REJECTED.tolist()}
    if judged.level is not None:
        coverage = [float((judged.level <= level).mean()) for level in LEVELS]
        return {
            "examples": n,
            "coverage": {"level": LEVELS.tolist(), "held": coverage},
            "rejection": rejection | {"rmse": np.sqrt(error).tolist()},
        }
    # bins are (low, high]
    index = np.clip(np.ceil(judged.certainty * BINS), 1, BINS).astype(int) - 1
    count, right, confidence = (
        np.bincount(index, weights, BINS) for weights in (None, 1 - judged.error, judged.certainty)
    )
    return {
        "examples": n,
        "reliability": {
            "count": count.tolist(),
            "right": right.tolist(),
            "confidence": confidence.tolist(),
        },
        "rejection": rejection | {"accuracy": (1 - error).tolist()},
    }


def entropies(familiar: Judged, unseen: Judged, name: str, most: float | None) -> dict[str, Any]:
    """Return the entropies on familiar and on unseen inputs, as two histograms.

    `auroc` says how well entropy tells the two apart: 0.5 is not at all.

    Args:
        familiar, unseen: the predictions.
        name: of the unseen inputs.
        most: the largest entropy that there can be; None where there is no limit.
    """
    values = np.concatenate([familiar.entropy, unseen.entropy])
    low, high = (
        (0.0, most) if most is not None else (float(values.min()), float(values.max()) + 1e-9)
    )
    edges = np.linspace(low, high, ENTROPY_BINS + 1)

    def share(entropy: np.ndarray) -> list[float]:
        counts, _ = np.histogram(np.clip(entropy, low, high), edges)
        return (counts / len(entropy)).tolist()

    return {
        "what": name,
        "edges": edges.tolist(),
        "familiar": share(familiar.entropy),
        "unseen": share(unseen.entropy),
        "familiar_mean": float(familiar.entropy.mean()),
        "unseen_mean": float(unseen.entropy.mean()),
        "auroc": auroc(familiar.entropy, unseen.entropy),
    }


def auroc(low: np.ndarray, high: np.ndarray) -> float:
    """Return the probability that a value of `high` is above one of `low`, ties counted half."""
    ordered = np.sort(low)
    below = np.searchsorted(ordered, high, "left") + np.searchsorted(ordered, high, "right")
    return float(below.mean() / (2 * len(low)))
