"""Averages of iterates: which steps enter which segment, client by client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fedhb.network.vectors import Weights
from fedhb.training.average import Iterates


def weights_of(theta: list[list[float]], head: list[list[float]]) -> Weights:
    theta_, head_ = torch.tensor(theta), torch.tensor(head)
    return Weights(theta_, head_, torch.zeros(len(theta_), 0))


def steps(iterates: Iterates, weights: Weights, *batches: tuple[list[int], list[int]]) -> None:
    """Each step adds one to the weights of the clients that take it: (their positions, examples)."""
    for active, counts in batches:
        weights.theta[active] += 1
        weights.head[active] += 10
        batch: Any = SimpleNamespace(active=active, counts=counts)
        iterates(batch, weights.theta)


def test_segments_follow_a_burn_in_and_are_averages_of_their_iterates():
    weights = weights_of([[0.0, 0.0]], [[0.0]])
    iterates = Iterates(weights, True, [10], burn_in=0.2, segments=2)
    steps(iterates, weights, *[([0], [2])] * 5)
    # after 2 of 10 examples the burn-in ends; iterates 2 and 3, then 4 and 5
    assert [mean.tolist() for mean in iterates.averages(0)] == [[2.5, 2.5, 25.0], [4.5, 4.5, 45.0]]


def test_each_client_has_bounds_of_its_own():
    weights = weights_of([[0.0], [0.0]], [[], []])
    iterates = Iterates(weights, False, [4, 8], burn_in=0.0, segments=2)
    steps(iterates, weights, ([0, 1], [2, 2]), ([0, 1], [2, 2]), ([1], [2]), ([1], [2]))
    assert [mean.tolist() for mean in iterates.averages(0)] == [[1.0], [2.0]]
    assert [mean.tolist() for mean in iterates.averages(1)] == [[1.5], [3.5]]


def test_a_segment_without_a_step_has_no_average_and_the_last_iterate_is_in_the_last():
    weights = weights_of([[0.0]], [[]])
    iterates = Iterates(weights, False, [6], burn_in=0.5, segments=3)
    steps(iterates, weights, ([0], [6]))
    assert [mean.tolist() for mean in iterates.averages(0)] == [[1.0]]


def test_settling_makes_the_weights_the_last_average():
    weights = weights_of([[0.0]], [[0.0]])
    iterates = Iterates(weights, True, [6], burn_in=0.5, segments=1)
    steps(iterates, weights, *[([0], [1])] * 6)
    iterates.settle()
    assert weights.theta.tolist() == [[5.0]] and weights.head.tolist() == [[50.0]]
