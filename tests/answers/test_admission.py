"""The measure of lengths by which answers are refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr")

from fedhb.answers.admission import Lengths, Refused


def test_the_measure_of_lengths_follows_the_answers():
    def answer(scale):
        return {"m": torch.full((1, 100), scale), "loss": torch.tensor([1e9])}

    lengths = Lengths(answer(0.1), growth=10.0, least=50)
    lengths.check(answer(9.0))  # the floor: a vector of ones, times growth
    with pytest.raises(Refused):
        lengths.check(answer(11.0))
    for scale in (5.0, 5.0, 9.0):
        lengths.note(answer(scale))
    lengths.settle()
    lengths.check(answer(49.0))
    with pytest.raises(Refused):
        lengths.check(answer(51.0))
    with pytest.raises(Refused):
        lengths.check(answer(float("nan")))


def test_a_client_that_measures_curvature_in_a_round_is_not_too_long():
    """Of a network with many tensors: most clients measure none, and half of the answers are next
    to nothing.
    """
    lengths = Lengths({"curvature": torch.ones(1, 400)}, growth=100.0, least=16)
    lengths.note({"curvature": torch.zeros(1, 400)})
    lengths.settle()
    lengths.check({"curvature": torch.full((1, 400), 1e3)})
