"""FedProx: the strength of its pull, and on what."""

from __future__ import annotations

import pytest
import torch
from builders import mlp, problem

from fedhb.algorithms import FedAvg, FedProx
from fedhb.seeding import Randomness


@pytest.mark.parametrize("update", ["body", "full"])
def test_what_is_sent_is_pulled_by_mu_towards_what_was_received(update):
    prob = problem(mlp())
    algorithm = FedProx(mu=0.3, update=update)
    received = algorithm.start(prob, Randomness(0))
    for key in ("theta", "head"):
        pull = algorithm.pull(prob, received, key)
        if key == "head" and update == "body":
            assert pull is None
            continue
        assert pull is not None and pull.mu.tolist() == [[0.3]]
        assert torch.equal(pull.target, received[key])


def test_fedavg_has_no_pull():
    prob = problem(mlp())
    assert FedAvg().pull(prob, FedAvg().start(prob, Randomness(0)), "theta") is None
