"""Starting weights, predictions of several networks, sums over clients, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    labelled,
    mixture,
    mlp,
    niw,
    normal,
    plan_of,
    problem_of,
    same_bits,
)
from torch import Tensor

from fedhb.algorithms import Arrays, FedAvg, FedProx, build, toolbox


@pytest.mark.filterwarnings("ignore:.*running statistics")
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(),
        FedProx(update="full"),
        niw(update="full"),
        mixture(update="full", num_prototypes=3),
    ],
)
def test_sums_leave_what_they_are_given_as_it_is(algorithm: Any) -> None:
    """In float64 above all, where to convert an array does not copy it."""
    clients = labelled(9, 6)
    problem = problem_of(batch_normed(), clients)
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, [0, 1])
    found, _ = algorithm.local_update(problem, received, clients, {}, plan_of(train_head=True), RNG)

    def copies(arrays: Arrays) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in arrays.items()}

    given = [server, received, found]
    before = [copies(arrays) for arrays in given]
    algorithm.aggregate(problem, server, algorithm.summarise(problem, received, found, RNG), RNG)
    for arrays, original in zip(given, before, strict=True):
        assert same_bits(arrays, original)


@pytest.mark.parametrize("block", [4, 10, 10_000])
def test_differences_are_summed_block_by_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "BLOCK_NUMBERS", block)
    vectors, reference, weight = normal(3, 2, 5), normal(2, 5, seed=1), torch.tensor([1.0, 0.5, 2])
    squares = torch.empty_like(reference)
    total = toolbox.differences(vectors, reference, weight, squares)
    gaps, by = vectors - reference, weight.double().view(3, 1, 1)
    torch.testing.assert_close(total, (by * gaps).sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(squares, (by * gaps.square()).sum(0), rtol=0, atol=1e-14)
    parts = list(toolbox.blocks(3, 10))
    assert torch.equal(torch.cat([torch.arange(10)[part] for part in parts]), torch.arange(10))


def test_shared_sums_are_of_what_was_received() -> None:
    answers = {
        "head": normal(2, 3, seed=1),
        "loss": torch.tensor([2.0, 1.0]),
        "score": torch.tensor([0.5, 1.0]),
        "kl": torch.tensor([3.0, 4.0]),
        "examples": torch.tensor([10.0, 30.0]),
    }
    head, weight = normal(3, seed=2), torch.tensor([1.0, 3.0])
    sums = toolbox.summarise_shared(answers, {"head": head}, weight)
    assert [sums[key].item() for key in ("count", "weight", "examples")] == [2, 4, 40]
    assert [sums[key].item() for key in ("loss", "score", "kl")] == [50, 35, 7]
    expected = (answers["head"][0] + 3 * answers["head"][1]) / 4
    averaged = toolbox.average_shared({"head": head, "m": head}, sums)
    assert averaged.keys() == {"head"}
    torch.testing.assert_close(averaged["head"], expected, rtol=0, atol=1e-14)
    assert "head" not in toolbox.summarise_shared(answers, {}, weight)


def test_sums_of_chunks_add_up_in_float64_and_gathered_answers_are_put_below_each_other() -> None:
    total = toolbox.add(None, {"m": torch.tensor([1.0])})
    total = toolbox.add(total, {"m": torch.tensor([1e-12], dtype=torch.float64)})
    assert total["m"].dtype == torch.float64 and total["m"].item() == 1.0 + 1e-12
    rows = [{"m": torch.full((n, 2), float(n)), toolbox.ROWS: torch.full((n,), n)} for n in (1, 2)]
    gathered = toolbox.add(toolbox.add(None, rows[0]), rows[1])
    assert gathered["m"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert gathered[toolbox.ROWS].tolist() == [1, 2, 2]


def test_weights_start_at_what_was_received_and_each_client_has_its_own() -> None:
    problem = problem_of(batch_normed(), labelled(9))
    theta = problem.network.theta + 1.0
    weights = toolbox.start_weights(problem, theta, {"buffers": problem.network.buffers + 2.0}, 3)
    assert torch.equal(weights.theta, theta.expand(3, -1))
    assert torch.equal(weights.head, problem.network.head.expand(3, -1))
    assert torch.equal(weights.buffers, (problem.network.buffers + 2.0).expand(3, -1))
    weights.theta[0] = 0.0
    assert torch.equal(weights.theta[1], theta)
    each = toolbox.repeat(torch.stack([theta, 2 * theta]), 2)
    assert torch.equal(each, torch.stack([theta, 2 * theta]))


def test_a_prior_that_shortens_weights_beside_running_statistics_is_told() -> None:
    problem = problem_of(batch_normed(), labelled(9))
    with pytest.warns(UserWarning, match="batch_norm=batch"):
        parts = toolbox.shared_parts(problem, "full", shortens=True)
    assert parts.keys() == {"head", "buffers"}
    assert toolbox.shared_parts(problem, "body").keys() == {"buffers"}
    assert not toolbox.shared_parts(problem_of(mlp(4, 5, 3), labelled(9)), "body", shortens=True)


def test_networks_are_mixed_as_probabilities() -> None:
    problem, x = problem_of(mlp(4, 5, 3), labelled(9)), normal(6, 4, seed=2)
    weights = toolbox.start_weights(problem, problem.network.theta, {}, 2)
    weights.theta[1] += normal(problem.network.num_params, seed=3)
    outputs = problem.network.outputs(weights, x.expand(2, 6, 4)).softmax(-1)
    equal = toolbox.uniform(2, x, torch.float64)
    mixed = toolbox.mixture_prediction(problem, weights, equal, x)
    torch.testing.assert_close(mixed, outputs.mean(0), rtol=0, atol=1e-14)


def test_bytes_leave_out_records_and_what_both_sides_know() -> None:
    answers = {
        "theta": torch.zeros(2, 5),
        "examples": torch.ones(2),
        "loss": torch.ones(2),
        "score": torch.ones(2),
    }
    assert toolbox.num_bytes(answers) == 4 * (10 + 6)
    assert toolbox.answer_bytes(FedAvg(), answers) == 4 * 10
    sent = {"theta": torch.zeros(5), "head": torch.zeros(2)}
    assert toolbox.received_bytes(FedAvg(), sent, 3) == 3 * 4 * 7
    ensemble = build("ensemble")  # a network for each client, whose group both sides know
    each = {"theta": torch.zeros(3, 5), "group": torch.zeros(3, dtype=torch.int64)}
    assert toolbox.received_bytes(ensemble, each, 3) == 3 * 4 * 5
