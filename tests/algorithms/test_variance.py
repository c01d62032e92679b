"""The prior's variance from evidence: its parts, and what is not known."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, initial, labelled, mlp, normal, plan_of
from torch import Tensor

from fedhb.algorithms.empirical_bayes import few_steps, variance
from fedhb.algorithms.empirical_bayes.variance import Evidence
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, per_weight, tensor_means, tensor_sizes
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train


def test_sizes_and_means_of_tensors() -> None:
    network = Network(mlp(4, 5, 3))
    assert tensor_sizes(network, False) == [20, 5]
    assert tensor_sizes(network, True) == [20, 5, 15, 3]
    assert per_weight(torch.tensor([2.0, 3.0]), [3, 1]).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert tensor_means(torch.tensor([[1.0, 3.0, 8.0]]), [2, 1]).tolist() == [[2.0, 8.0]]


def test_a_pull_per_tensor_is_one_per_weight() -> None:
    clients, network = labelled(9, 6), Network(mlp(4, 5, 3))
    layers = tensor_sizes(network, False)
    mu, target = (
        torch.tensor([[0.3, 2.0], [0.1, 0.7]], dtype=torch.float64),
        normal(network.num_params, seed=5),
    )
    found = []
    for momentum in (0.0, 0.9):
        for pull in (
            Pull(mu, target, layers=layers),
            Pull(mu.repeat_interleave(torch.tensor(layers), 1), target),
        ):
            plan = plan_of(2, 4, lr=0.2, momentum=momentum)
            weights, _ = train(
                network, Categorical(3), initial(network, 2), clients, plan, RNG, Penalty(pull)
            )
            found.append(weights.theta)
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found[2], found[3], rtol=1e-13, atol=1e-14)
    assert not torch.allclose(found[0], found[2])


def summary_of(m: Tensor, head: Tensor | None = None) -> dict[str, Tensor]:
    """Return the sums over clients that moved by these differences and measured h = 2."""
    sums = {"m": m.sum(0), "squares": m.square().sum(0), "count": torch.tensor(float(len(m)))}
    if head is not None:
        sums |= {"head": head.sum(0), "head_squares": head.square().sum(0)}
    tensors = 2 if head is not None else 1
    measured = torch.full((tensors,), 2.0 * len(m), dtype=torch.float64)
    sums |= {"measured": torch.tensor([float(len(m))]), "curvature": measured}
    sums |= {"curvature_squares": 2.0 * measured / 3.0}
    return sums | {
        key: torch.zeros(1 if key == "reach_count" else tensors, dtype=torch.float64)
        for key in few_steps.ANSWERS
    }


def test_scatter_and_common_movement_are_of_head_and_body() -> None:
    m, head = normal(5, 4, seed=1), normal(5, 3, seed=2)
    sums = summary_of(m, head)
    scatter = variance.scatter(sums, [4, 3])
    expected = torch.stack([m.square().sum() / 4, head.square().sum() / 3])
    torch.testing.assert_close(scatter, expected)
    together = torch.stack([m.sum(0).square().sum() / 4, head.sum(0).square().sum() / 3])
    torch.testing.assert_close(variance.common_movement(sums, [4, 3]), together)
    body = {key: value for key, value in sums.items() if key != "head_squares"}
    torch.testing.assert_close(variance.scatter(body, [4]), expected[:1])
    torch.testing.assert_close(variance.common_movement(body, [4]), together[:1])


def test_evidence_adds_up_over_the_rounds() -> None:
    server = variance.unlearned(torch.full((1,), 50.0, dtype=torch.float64))
    assert not any(row.any() for row in Evidence.of(server))
    rounds = [normal(5, 4, seed=1), normal(3, 4, seed=2)]
    for m in rounds:
        server |= variance.learn(server, summary_of(m), [4], 50.0, 10.0, most=1.0)
    evidence = Evidence.of(server)
    moved = torch.cat(rounds)
    assert evidence.answers.item() == evidence.measured.item() == 8.0
    assert evidence.scatter.item() == pytest.approx(moved.square().sum().item() / 4)
    assert variance.mean_curvature(evidence).item() == pytest.approx(2.0)
    # tr(H) = 8 and tr(H^2) = 16 * 4 / 3: three of four directions
    assert variance.directions(evidence, [4]).item() == pytest.approx(3.0)
    assert variance.steepness(evidence, [4]).item() == pytest.approx(8.0 / 3.0)
    s, h = moved.square().mean().item(), 2.0
    for key, ratio in (("V0", 1.0), (variance.PERSONAL, 4.0 / 3.0)):
        u = server[key].item() / 50.0
        assert h * u**2 - s * ratio * h * u - s == pytest.approx(0.0, abs=1e-12) and u > 0


def test_nothing_is_known_before_the_first_measurement() -> None:
    server = variance.unlearned(torch.full((1,), 50.0, dtype=torch.float64))
    summary = summary_of(normal(5, 4, seed=1))
    for key in ("measured", "curvature", "curvature_squares"):
        summary[key] = torch.zeros_like(summary[key])
    new = variance.learn(server, summary, [4], 50.0, 10.0, most=1.0)
    assert new["V0"].item() == new[variance.PERSONAL].item() == 50.0
    assert Evidence.of(new).scatter.item() > 0 and Evidence.of(new).answers.item() == 5.0
    assert variance.mean_curvature(Evidence.of(new)).item() == 0.0
