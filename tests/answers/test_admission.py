"""The gate: what an answer must be, and how long it may be."""

from __future__ import annotations

import builders
import pytest
import torch

import fedhb
from fedhb.algorithms.contract import (
    ClientId,
    Measurements,
    NonNegative,
    NumExamples,
    Reported,
    Shares,
    Vector,
)
from fedhb.answers.admission import (
    Lengths,
    Refused,
    admit,
    check_alike,
    check_finite,
    check_metrics,
    check_values,
    finite_rows,
)
from fedhb.errors import DivergedError, FailedRoundError, InputError

DECLARED = {
    "w": Vector("w0"),
    "shares": Shares(),
    "rate": NonNegative(),
    "measured": Measurements(),
    "loss": Reported(),
    "n": NumExamples(),
    "who": ClientId(),
}


def answer(**changes: object) -> dict[str, torch.Tensor]:
    """Return the answer of client 7 with 20 examples, of 50 in all."""
    sent = {
        "w": [[-1.0, 2.0]],
        "shares": [[0.25, 0.75]],
        "rate": [[0.5]],
        "measured": [[0.0, 3.0]],
        "loss": [-2.0],
        "n": [20.0],
        "who": [7],
    }
    return {key: torch.tensor(value) for key, value in (sent | changes).items()}


def check(**changes: object) -> None:
    check_values(answer(**changes), DECLARED, client=7, examples=20, most=50)


def test_an_answer_that_is_what_it_is_declared_to_be_is_admitted():
    check()
    check(w=[[-1e30, 0.0]], loss=[-1e30])  # their sign means nothing


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shares": [[1.5, -0.5]]}, "'shares'.*negative"),
        ({"rate": [[-0.1]]}, "'rate'.*negative"),
        ({"n": [21.0]}, "21 examples.*counted with 20"),
        ({"n": [-20.0]}, "-20 examples"),
        ({"who": [8]}, r"client \[8\]'s"),
    ],
)
def test_an_answer_that_is_not_what_it_is_declared_to_be_is_refused(changes, says):
    with pytest.raises(Refused, match=says):
        check(**changes)


@pytest.mark.parametrize("examples", [0, 51])
def test_a_client_counts_as_more_than_nothing_and_at_most_all_examples(examples):
    with pytest.raises(Refused, match="examples"):
        check_values(answer(n=[float(examples)]), DECLARED, 7, examples, 50)


def test_answers_of_this_process_are_declared_finite_and_a_row_for_each_client():
    rows = {"w": torch.ones(2, 3)}
    assert admit(rows, DECLARED, [4, 9], 1) is rows
    with pytest.raises(InputError, match="'secret'.*answer"):
        admit({"secret": torch.ones(2)}, DECLARED, [4, 9], 1)
    with pytest.raises(FailedRoundError, match="round 5: 3 clients.*'w' has 2 rows"):
        admit(rows, DECLARED, [4, 9, 11], 5)
    rows["w"][1, 2] = float("nan")
    with pytest.raises(DivergedError, match="round 1: client 9.*'w'"):
        admit(rows, DECLARED, [4, 9], 1)


def test_a_wrong_number_of_rows_ends_a_run_as_a_failed_round():
    class Short(fedhb.FedAvg):
        def local_update(self, *args):
            answers, memory = super().local_update(*args)
            return answers | {"loss": answers["loss"][:1]}, memory

    options = {"rounds": 1, "fraction": 1.0, "batch_size": 4, "progress": False}
    with pytest.raises(FailedRoundError, match="'loss' has 1 rows"):
        fedhb.fit(builders.mlp(), builders.clients(), Short(), **options)


def test_large_numbers_are_finite():
    huge = {"w": torch.tensor([[3e38, 3e38], [1.0, float("inf")]])}
    with pytest.raises(DivergedError, match="client 9"):
        admit(huge, DECLARED, [4, 9], 1)
    assert finite_rows(huge).tolist() == [True, False]
    with pytest.raises(Refused, match="'w'"):
        check_finite(huge)
    check_finite({"w": huge["w"][:1]})


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"w": torch.ones(1, 2)}, "holds"),
        ({"w": torch.ones(1, 3), "b": torch.ones(1)}, "shape"),
        ({"w": torch.ones(1, 2).double(), "b": torch.ones(1)}, "type"),
    ],
)
def test_an_answer_is_like_the_sample(other, says):
    sample = {"w": torch.zeros(1, 2), "b": torch.zeros(1)}
    check_alike(sample, sample)
    with pytest.raises(Refused, match=says):
        check_alike(other, sample)


@pytest.mark.parametrize("metrics", [{}, {"nll": "1"}, {"nll": float("nan")}, {"nll": 1.0, "x": 2}])
def test_metrics_are_those_that_were_asked_for(metrics):
    assert check_metrics({"nll": 1.0}, ["nll"]) == {"nll": 1.0}
    with pytest.raises(Refused):
        check_metrics(metrics, ["nll"])


def test_the_measure_of_lengths_follows_the_answers():
    def sent(scale):
        return {"m": torch.full((1, 100), scale), "loss": torch.tensor([1e9])}

    lengths = Lengths(sent(0.1), {"m": Vector("m0"), "loss": Reported()}, growth=10.0)
    lengths.check(sent(9.0))  # the floor: a vector of ones, times growth
    with pytest.raises(Refused):
        lengths.check(sent(11.0))
    for scale in (5.0, 5.0, 9.0):
        lengths.note(sent(scale))
    lengths.settle()
    lengths.check(sent(49.0))
    with pytest.raises(Refused):
        lengths.check(sent(51.0))
    with pytest.raises(Refused):
        lengths.check(sent(float("nan")))


def test_a_client_that_measures_curvature_in_a_round_is_not_too_long():
    """Of a network with many tensors: most clients measure none, and half of the answers are next
    to nothing.
    """
    lengths = Lengths({"h": torch.ones(1, 400)}, {"h": Measurements()}, growth=100.0)
    lengths.note({"h": torch.zeros(1, 400)})
    lengths.settle()
    lengths.check({"h": torch.full((1, 400), 1e3)})
