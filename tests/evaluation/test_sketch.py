"""Sketches of the clients' weights."""

from __future__ import annotations

import math

import torch

from fedhb.evaluation.sketch import WIDTH, Sketch


def test_sketches_keep_distances_and_come_from_the_seed():
    theta = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    theta[4:] += torch.tensor([0.5, 1.0, 2.0, 4.0]).unsqueeze(
        1
    )  # whole vectors apart: only signs keep these from adding up
    found = Sketch(5000, 3, torch.device("cpu"))(theta)
    ratio = (torch.cdist(found, found) / torch.cdist(theta.double(), theta.double()))[
        ~torch.eye(8, dtype=bool)
    ]
    assert (ratio - 1).abs().max() < 5 / math.sqrt(
        2 * WIDTH
    )  # five standard deviations of a sketched length
    assert torch.equal(found, Sketch(5000, 3, torch.device("cpu"))(theta))
    assert not torch.equal(found, Sketch(5000, 4, torch.device("cpu"))(theta))
