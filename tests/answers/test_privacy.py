"""Differential privacy: the noise, the accountant, and an audit that would notice half of the noise
missing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("dp_accounting")

import builders
from private_answers import RNG, answers, privacy
from scipy import stats

import fedhb
from fedhb.answers.privacy import Mechanism, Private


def epsilon(noise: float, num_clients: int, cohort: int, rounds: int, delta: float) -> float:
    """Return what so many rounds cost."""
    return Mechanism(noise, 1.0, delta, num_clients, cohort).epsilon(rounds)


def test_the_noise_has_its_deviation_and_is_new_in_every_round_and_sum():
    algorithm = fedhb.FedAvg()
    private = Private(algorithm, privacy(noise=2.0, clip=3.0))
    sums = {
        "theta": torch.zeros(40_000, dtype=torch.float64),
        "head": torch.zeros(40_000, dtype=torch.float64),
    }
    first, second = (private.noised(sums | {"count": torch.tensor(6.0)}, r) for r in (1, 2))
    draws = [first["theta"], first["head"], second["theta"]]
    for draw in draws:
        assert stats.kstest(draw.numpy() / 6.0, "norm").pvalue > 1e-4
    correlations = np.corrcoef(torch.stack(draws).numpy())[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(
        40_000
    )  # five deviations of a correlation of independent draws
    again = private.noised(sums, 1)["theta"]
    assert torch.equal(again, first["theta"])  # a resumed run draws the same
    moved = sums | {
        "theta": sums["theta"] + 1e-12
    }  # and one that is run again over other answers does not: it would cancel
    draws = [private.noised(one, 1)["theta"] for one in (sums, moved)]
    assert abs(np.corrcoef(*draws)[0, 1]) < 5 / math.sqrt(40_000)
    other = Private(algorithm, privacy(noise=2.0, clip=3.0, key=b"x" * 32)).noised(sums, 1)["theta"]
    assert abs(np.corrcoef(other, first["theta"])[0, 1]) < 5 / math.sqrt(40_000)


def test_the_count_is_the_cohorts_however_many_answered():
    algorithm = fedhb.FedAvg()
    problem, server, received, found = answers(algorithm)
    private = Private(algorithm, privacy(noise=0.0, clip=1e6))
    some = {key: value[:2] for key, value in found.items()}
    new = private.aggregate(problem, server, private.summarise(problem, received, some, RNG), RNG)
    expected = server["theta"] + (some["theta"] - server["theta"]).sum(0) / 6
    torch.testing.assert_close(new["theta"], expected)


def test_the_accountant_gives_published_values():
    """Abadi et al.'s setting as the TensorFlow Mechanism tutorial computes it: batches of 256 of
    60,000, noise 1.1, 60 epochs, delta 1e-5 give epsilon 2.92 (Mironov's conversion; the
    accountant's present one is tighter).

    And, by Mironov 2017, T Gaussian releases have Renyi divergence T alpha / (2 z^2).
    """
    import dp_accounting
    from dp_accounting import rdp

    event = dp_accounting.PoissonSampledDpEvent(256 / 60_000, dp_accounting.GaussianDpEvent(1.1))
    steps = 60 * 60_000 // 256
    found = rdp.RdpAccountant().compose(event, steps).get_epsilon(1e-5)
    assert 2.3 < found <= 2.92
    z, rounds, delta = 4.0, 10, 1e-5
    alpha = np.linspace(1.01, 200, 100_000)
    mironov = (rounds * alpha / (2 * (z / 2) ** 2) + math.log(1 / delta) / (alpha - 1)).min()
    ours = epsilon(z, 100, 100, rounds, delta)
    assert 0.85 * mironov < ours <= mironov


def test_sampling_without_replacement_is_accounted_for():
    """Theorem 9 of Wang, Balle and Kasiviswanathan (2019), written out for integer orders, is never
    beaten by ours from above.
    """
    z, n, m, rounds, delta = 2.0, 1000, 50, 30, 1e-5
    gamma, multiplier = m / n, z / 2

    def plain(order):
        return order / (2 * multiplier**2)

    def bound(order):
        terms = [
            0.0,
            2 * math.log(gamma)
            + math.log(math.comb(order, 2))
            + math.log(min(4 * math.expm1(plain(2)), 2 * math.exp(plain(2)))),
        ]
        terms += [
            j * math.log(gamma) + math.log(math.comb(order, j)) + (j - 1) * plain(j) + math.log(2)
            for j in range(3, order + 1)
        ]
        return float(np.logaddexp.reduce(terms)) / (order - 1)

    theirs = min(rounds * bound(a) + math.log(1 / delta) / (a - 1) for a in range(2, 40))
    ours = epsilon(z, n, m, rounds, delta)
    assert ours <= theirs * 1.001
    assert ours < epsilon(z, n, n, rounds, delta) / 3, "sampling protects"
    assert epsilon(z, n, m, 2 * rounds, delta) > ours > epsilon(2 * z, n, m, rounds, delta)


def audit(noise: float, claimed: Mechanism, trials: int = 4000) -> float:
    """A lower bound of epsilon, with 99 % confidence, from telling two federations apart that
    differ in one client.

    The client's answer is as far as it can be in one direction, or in the other; the adversary
    knows everything else.
    """
    algorithm = fedhb.FedAvg(update="body")
    problem = builders.problem()
    server = {"theta": torch.zeros(problem.network.num_params, dtype=torch.float64)}
    direction = torch.zeros_like(server["theta"])
    direction[0] = 100.0
    found = {
        "theta": torch.stack([direction, -direction]),
        "examples": torch.ones(2, dtype=torch.float64),
    }
    found |= {"loss": torch.zeros(2), "score": torch.zeros(2)}
    outputs = []
    for sign in range(2):
        one = {key: value[sign : sign + 1] for key, value in found.items()}
        for trial in range(trials):
            key = f"{sign}/{trial}".encode()
            private = Private(algorithm, replace(claimed, noise=noise, key=key))
            if trial == 0:
                sums = private.summarise(problem, server, one, RNG)
            outputs.append(float(private.aggregate(problem, server, sums, RNG)["theta"][0]))
    plus, minus = np.array(outputs[:trials]), np.array(outputs[trials:])
    best = 0.0
    for threshold in np.quantile(plus, [0.5, 0.75, 0.9]):
        hits, misses = int((plus > threshold).sum()), int((minus > threshold).sum())
        low = stats.beta.ppf(0.005, hits, trials - hits + 1)
        high = stats.beta.ppf(0.995, misses + 1, trials - misses)
        best = max(best, math.log(max(low - claimed.delta, 1e-12) / high))
    return best


def test_an_audit_finds_no_more_than_is_claimed_and_would_find_missing_noise():
    claimed = privacy(noise=1.5, clip=1.0, num_clients=1, cohort=1, delta=1e-3)
    promise = claimed.epsilon(1)
    honest = audit(1.5, claimed)
    assert 0.5 < honest <= promise, (honest, promise)
    assert audit(0.3, claimed) > promise, "a fifth of the noise would be noticed"
