"""The examples run and print sensible numbers; the third family's formulas are those of its
objective.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fedhb.algorithms import Arrays, Federation, Problem, objectives
from fedhb.algorithms.toolbox import add
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"(-?\d+\.\d+)"


def output_of(name: str, folder: Path) -> str:
    """Return what an example prints, run from another folder with warnings as errors; it leaves no
    file behind.
    """
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that `pattern` captures, with # for a number."""
    found = re.search(pattern.replace("#", NUMBER), text)
    assert found, f"{pattern!r} not in:\n{text}"
    return [float(group) for group in found.groups()]


# The ranges are wide: they tell a working example from a broken one (chance, divergence), not one
# version of torch from another.


def test_images_from_arrays(tmp_path: Path) -> None:
    text = output_of("images_from_arrays", tmp_path)
    before, after = numbers(r"training clients: global accuracy #, personalised #", text)
    assert before > 0.75  # chance is 0.1
    assert after > 0.9  # four digits instead of ten
    (novel_before,) = numbers(r"before personalisation #", text)
    (novel_after,) = numbers(r"after personalisation  #", text)
    assert novel_before > 0.55
    assert novel_after > 0.8


def test_hospitals(tmp_path: Path) -> None:
    text = output_of("hospitals", tmp_path)
    best_accuracy, best_nll = numbers(r"best possible +#  #", text)
    for method in ("empirical-bayes", "fedavg", "fedbabu"):
        accuracy, nll, ece, own_accuracy, own_nll, own_ece = numbers(
            rf"{method} +#  #  # +#  #  #", text
        )
        assert (
            best_nll - 0.02 < own_nll < nll < 0.8
        )  # hospitals differ, so personalisation helps on average
        assert all(0.55 < a < best_accuracy + 0.02 for a in (accuracy, own_accuracy))
        assert all(0 < e < 0.3 for e in (ece, own_ece))
    entropy_before, entropy_after = (
        numbers(rf"{when} +accuracy .* entropy # bits", text)[0] for when in ("before", "after")
    )
    assert 0 < entropy_before <= 1
    assert 0 < entropy_after <= 1
    sure, unsure = numbers(r"lowest entropy #, with the highest #", text)
    assert sure > unsure + 0.05


def test_regression(tmp_path: Path) -> None:
    text = output_of("regression", tmp_path)
    for who in ("20 that trained", "5 held out"):
        rmse, _, coverage, own_rmse, _, own_coverage = numbers(
            rf"{who} +#  +#  +# % +#  +#  +# %", text
        )
        assert own_rmse < 0.7 * rmse
        assert 50 < coverage < 88  # the global posterior is too sure of itself, as the example says
        assert 84 < own_coverage < 97
    assert (
        len(
            re.findall(
                rf"true +{NUMBER} +before +{NUMBER} ± {NUMBER} +after +{NUMBER} ± {NUMBER}", text
            )
        )
        == 4
    )


def test_third_family(tmp_path: Path) -> None:
    text = output_of("third_family", tmp_path)
    before, after = numbers(r"global accuracy #, personalised #", text)
    assert before > 0.8
    assert after > 0.93
    deviations = [
        numbers(rf"{layer} +#", text)[0]
        for layer in ("hidden1.weight", "hidden1.bias", "hidden2.weight", "hidden2.bias")
    ]
    prior_alone = (
        0.01 * (1 / (1 + 20 + 1)) ** 0.5
    )  # c sqrt(n / (n + N + 1)): what s would be if no client ever moved
    assert all(prior_alone < deviation < 0.1 for deviation in deviations)
    assert "predicts the same: True" in text


# The third family
# --------------------------------------------------------------------------------------------------------------

NUM_CLIENTS, COHORT = 7, 4


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("third_family", EXAMPLES / "third_family.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def problem() -> Problem:
    """A body of four tensors in double precision, so that identities hold to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3)
    ).double()
    return Problem(Network(model), Categorical(3), Federation(NUM_CLIENTS, 100, 3))


def draw_state(example: ModuleType, problem: Problem, seed: int) -> tuple[object, Arrays, Tensor]:
    """The algorithm with settings that all matter, a server state, and what a cohort found."""
    generator = torch.Generator().manual_seed(seed)
    algorithm = example.LayerScales(kl_weight=0.3, lambda0=0.7, prior_scale=0.4, prior_clients=1.3)
    server = algorithm.start(problem, Randomness(0))
    server["s"] = torch.rand(4, generator=generator, dtype=torch.float64) + 0.1
    m = server["r"] + 0.5 * torch.randn(
        COHORT, problem.network.num_params, generator=generator, dtype=torch.float64
    )
    return algorithm, server, m


def solve(
    algorithm, problem: Problem, server: Arrays, m: Tensor, chunks: list[list[int]]
) -> Arrays:
    rng, total = Randomness(0, 1), None
    for chunk in chunks:
        found = {
            "m": m[chunk],
            "examples": torch.tensor([10.0 + k for k in chunk], dtype=torch.float64),
        }
        total = add(
            total, algorithm.summarise(problem, algorithm.broadcast(server, chunk), found, rng)
        )
    return algorithm.aggregate(problem, server, total, rng)


@pytest.mark.parametrize("seed", range(3))
def test_the_pull_is_the_gradient_of_the_kl(
    example: ModuleType, problem: Problem, seed: int
) -> None:
    algorithm, server, m = draw_state(example, problem, seed)
    sizes = torch.tensor([3, 50, 7, 20])
    m.requires_grad_()
    (gradient,) = torch.autograd.grad(algorithm.kl(problem, server, m).sum(), m)
    pull = algorithm.pull(problem, server, sizes)
    expected = algorithm.kl_weight * gradient / sizes.unsqueeze(1)
    torch.testing.assert_close(
        pull.mu * (m.detach() - pull.target), expected, rtol=1e-12, atol=1e-14
    )


def test_the_terms_are_the_densities_of_the_model(example: ModuleType, problem: Problem) -> None:
    """Against torch's own densities, up to what does not depend on (r, s)."""
    algorithm, first, m = draw_state(example, problem, 0)
    _, second, _ = draw_state(example, problem, 1)
    second["r"] = second["r"] + 0.1
    a, b = algorithm.prior(problem)

    def direct(server: Arrays) -> tuple[Tensor, Tensor]:
        s = torch.cat(
            [
                s.expand(slot.stop - slot.start)
                for s, slot in zip(server["s"], problem.network.body_slots, strict=True)
            ]
        )
        mu = (
            torch.distributions.Normal(torch.zeros_like(s), (s / algorithm.lambda0).sqrt())
            .log_prob(server["r"])
            .sum()
        )
        client = torch.distributions.Normal(server["r"], s.sqrt()).log_prob(m).sum(-1)
        return -torch.distributions.InverseGamma(a, b).log_prob(server["s"]).sum() - mu, client

    (global_kl, prior), (other_global_kl, other_prior) = direct(first), direct(second)
    difference = algorithm.global_kl(problem, first) - algorithm.global_kl(problem, second)
    torch.testing.assert_close(difference, global_kl - other_global_kl, rtol=1e-10, atol=1e-10)
    difference = algorithm.expected_log_prior(problem, first, m) - algorithm.expected_log_prior(
        problem, second, m
    )
    torch.testing.assert_close(difference, prior - other_prior, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_aggregate_minimises_the_server_objective(
    example: ModuleType, problem: Problem, seed: int
) -> None:
    """N_f = 4 of N = 7: the gradient vanishes, and no small step in any direction lowers the
    objective.
    """
    algorithm, server, m = draw_state(example, problem, seed)
    new = solve(algorithm, problem, server, m, [[0, 1, 2, 3]])
    point = {key: new[key].clone().requires_grad_() for key in ("r", "s")}
    objective = objectives.server_objective(algorithm, problem, point, m)
    objective.backward()
    for key in ("r", "s"):
        # a gradient is a sum of terms of the size of the old point's gradient, which is of order
        # 100
        assert point[key].grad.abs().max() < 1e-10, key
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        step = {
            key: 1 + 0.01 * torch.randn(new[key].shape, generator=generator, dtype=torch.float64)
            for key in ("r", "s")
        }
        moved = {key: new[key] * step[key] for key in ("r", "s")}
        assert objectives.server_objective(algorithm, problem, moved, m) > objective.item()
    assert objectives.server_objective(algorithm, problem, server, m) > objective.item()


def test_chunks_of_a_cohort_may_come_in_any_order(example: ModuleType, problem: Problem) -> None:
    algorithm, server, m = draw_state(example, problem, 0)
    whole = solve(algorithm, problem, server, m, [[0, 1, 2, 3]])
    for chunks in ([[3], [1], [0], [2]], [[2, 3], [0, 1]], [[1], [3, 0, 2]]):
        parts = solve(algorithm, problem, server, m, chunks)
        for key in ("r", "s"):
            torch.testing.assert_close(
                parts[key], whole[key], rtol=1e-13, atol=1e-14
            )  # the order of float64 sums


def test_samples_spread_as_their_layer_does(example: ModuleType, problem: Problem) -> None:
    algorithm, server, _ = draw_state(example, problem, 0)
    theta = algorithm.sample(problem, server, 4000, torch.Generator().manual_seed(0))
    for slot, s in zip(problem.network.body_slots, server["s"], strict=True):
        part = theta[:, slot.start : slot.stop] - server["r"][slot.start : slot.stop]
        # the relative error of a variance from n normal draws is sqrt(2 / n), at most 0.016 here
        assert abs(part.square().mean() / s - 1) < 5 * (2 / part.numel()) ** 0.5
