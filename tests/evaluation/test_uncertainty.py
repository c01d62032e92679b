"""How much predictions know of their own errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedhb.evaluation.uncertainty import BINS, auroc, describe, entropies, judge, together
from fedhb.likelihood import Categorical, GaussianRegression, calibration_error


def test_bins_of_reliability_give_the_calibration_error():
    p = torch.softmax(3 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0)), -1)
    y = torch.randint(5, (400,), generator=torch.Generator().manual_seed(1))
    bins = describe(
        together(
            [
                judge(Categorical(5), part, y[k])
                for k, part in zip(torch.arange(400).split(90), p.split(90), strict=True)
            ]
        )
    )
    gaps = np.abs(np.array(bins["reliability"]["right"]) - bins["reliability"]["confidence"])
    assert gaps.sum() / 400 == pytest.approx(calibration_error(p, y)) and len(gaps) == BINS


def test_rejection_removes_the_least_certain_first():
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.55, 0.45]])
    found = describe(judge(Categorical(2), p, torch.tensor([0, 1, 0, 1])))[
        "rejection"
    ]  # wrong where it is unsure
    at = dict(zip(found["rejected"], found["accuracy"], strict=True))
    assert (at[0.0], at[0.25], at[0.5]) == (0.5, pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_coverage_of_exact_intervals_is_their_level(count):
    y = torch.randn(20_000, count, generator=torch.Generator().manual_seed(0))
    prediction = torch.stack([torch.zeros(20_000, count), torch.ones(20_000, count)], dim=1)
    likelihood = GaussianRegression(num_targets=count)
    found = describe(
        together([judge(likelihood, prediction[k], y[k]) for k in torch.arange(20_000).split(6000)])
    )["coverage"]
    assert found["held"][17] == pytest.approx(
        likelihood.metrics(prediction, y)["coverage"], abs=1e-9
    )
    assert (
        np.abs(np.array(found["held"]) - found["level"]).max() < 0.018
    )  # five standard errors of a share of 20,000


def test_entropy_tells_apart():
    sure, unsure = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[0.5, 0.5]] * 6)
    found = entropies(judge(Categorical(2), sure), judge(Categorical(2), unsure), "x", math.log(2))
    assert found["auroc"] == 1.0 and found["familiar"][0] == 1.0 and found["unseen"][-1] == 1.0
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5
