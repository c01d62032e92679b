"""Several networks on one server: their starts."""

from __future__ import annotations

import torch
from builders import mlp, problem

from fedhb.algorithms.several_networks import different_starts, learner_of
from fedhb.seeding import Randomness

RNG = Randomness(3)


def test_a_start_has_each_tensors_entries_in_another_order():
    prob = problem(mlp())
    network = prob.network
    starts = different_starts(prob, 3, "full", 0.0, RNG)
    assert torch.equal(starts["theta"][0], network.theta)
    for k in (1, 2):
        assert not torch.equal(starts["theta"][k], network.theta)
        for slot in network.body_slots:
            part = starts["theta"][k, slot.start : slot.stop]
            assert torch.equal(part.sort()[0], network.theta[slot.start : slot.stop].sort()[0])


def test_a_start_does_not_depend_on_how_many_there_are():
    prob = problem(mlp())
    two, four = (different_starts(prob, count, "full", 0.1, RNG) for count in (2, 4))
    assert all(torch.equal(two[key], four[key][:2]) for key in two)


def test_noise_is_added_to_a_network_that_was_trained_before():
    prob = problem(mlp())
    moved = different_starts(prob, 2, "body", 1e-3, RNG)
    assert "head" not in moved
    step = (moved["theta"][1] - prob.network.theta).abs()
    assert 0 < step.max() < 1e-2
    assert learner_of(moved, 1).keys() == moved.keys() and torch.equal(
        learner_of(moved, 1)["theta"], moved["theta"][1]
    )
