"""Theorem 2: the Hellinger distance, the certificate of it, and the terms of the theorem."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from problems import linear, niw, normal, problem_of, regression
from scipy import integrate, stats
from torch.distributions import Normal

from fedhb.likelihood import GaussianRegression
from fedhb_paper import theorem_generalisation
from fedhb_paper.hellinger import Backbone, certificate, log_ratio, squared_hellinger
from fedhb_paper.theorem_generalisation import Truth, joint_kl, sample_clients


def test_the_distance_is_that_of_the_densities() -> None:
    for f, g, noise in ((0.0, 0.5, 0.3), (1.0, -1.0, 0.7), (0.2, 0.2, 1.0)):
        overlap, _ = integrate.quad(
            lambda y, f=f, g=g, s=noise: math.sqrt(
                stats.norm.pdf(y, f, s) * stats.norm.pdf(y, g, s)
            ),
            -9,
            9,
        )
        assert squared_hellinger(np.array(f), np.array(g), noise) == pytest.approx(
            1 - overlap, abs=1e-9
        )


def test_the_ratio_is_that_of_the_densities() -> None:
    y, f, truth = np.random.default_rng(0).normal(size=(3, 2, 5))
    expected = (stats.norm.logpdf(y, f, 0.4) - stats.norm.logpdf(y, truth, 0.4)).sum(1)
    np.testing.assert_allclose(log_ratio(y, f, truth, 0.4), expected, rtol=1e-12)


def test_half_the_ratio_has_the_mean_that_the_certificate_needs() -> None:
    """E exp(l_n / 2) = (1 - d^2)^n, while E exp(l_n) = 1 says nothing of d^2: the whole ratio
    cannot take its place.
    """
    rng, noise, n = np.random.default_rng(0), 0.5, 4
    x = rng.uniform(-1, 1, size=(400_000, n))
    truth, f = np.sin(2 * x), np.sin(2 * x) + 0.6 * x
    ratio = log_ratio(truth + noise * rng.normal(size=x.shape), f, truth, noise)
    half = np.exp(ratio / 2)
    d2 = squared_hellinger(f, truth, noise).mean()
    error = 5 * half.std() / math.sqrt(len(half))
    assert half.mean() == pytest.approx((1 - d2) ** n, abs=error)
    assert (1 - d2) ** n < 1 - 20 * error
    assert np.exp(ratio).mean() == pytest.approx(
        1.0, abs=5 * np.exp(ratio).std() / math.sqrt(len(half))
    )


@pytest.mark.parametrize("dof", ["full", "per_coordinate"])
def test_the_joint_kl_is_a_mean_of_log_densities(dof: str) -> None:
    """Against draws of phi and theta, for d = 1, where both kinds of NIW are one and densities are
    those of scipy.
    """
    eps, clients = 0.3, regression(6, 6, 6, inputs=1)
    algorithm = niw(p_do=1.0, eps=eps, dof=dof)
    problem = problem_of(linear(1), clients, GaussianRegression(noise=0.4), head="")
    m = normal(3, 1, seed=4)
    found = joint_kl(algorithm, problem, m, counts=3)
    # the conjugate posterior of three weights with mean square eps^2 around m_i: l0 = 4, n0 = 3 + 3
    m0 = m.sum() / 4
    V0 = 1 + 3 * eps**2 + m0**2 + (m - m0).square().sum()
    rng, count = np.random.default_rng(0), 400_000
    variance = stats.invgamma(6 / 2, scale=float(V0) / 2).rvs(count, random_state=rng)
    mu = rng.normal(float(m0), np.sqrt(variance / 4))
    log_q = stats.invgamma(3, scale=float(V0) / 2).logpdf(variance) + stats.norm.logpdf(
        mu, float(m0), np.sqrt(variance / 4)
    )
    log_p = stats.invgamma(3 / 2, scale=1 / 2).logpdf(variance) + stats.norm.logpdf(
        mu, 0.0, np.sqrt(variance)
    )
    terms = log_q - log_p
    for m_i in m[:, 0].tolist():
        theta = rng.normal(m_i, eps, size=count)
        terms += stats.norm.logpdf(theta, m_i, eps) - stats.norm.logpdf(
            theta, mu, np.sqrt(variance)
        )
    assert found == pytest.approx(terms.mean(), abs=5 * terms.std() / math.sqrt(count))
    assert found > 0.5


def test_counting_examples_instead_of_clients_only_costs() -> None:
    """q(phi) has seen N weights; with l0 and n0 as if it had seen |D|, the joint KL is larger, the
    more so the more examples.
    """
    problem = problem_of(
        linear(4), regression(6, 6, 6, inputs=4), GaussianRegression(noise=0.4), head=""
    )
    m = normal(3, 4, seed=1)
    values = [joint_kl(niw(p_do=1.0), problem, m, counts) for counts in (3, 30, 300, 3000)]
    assert values == sorted(values) and values[3] > values[0] + 10


def test_the_certificate_holds_for_a_conjugate_posterior() -> None:
    """theta ~ N(0, 1), y = theta x + noise: the exact posterior; over 200 data sets the bound may
    fail in 5 %, and never does.
    """
    rng, noise, n = np.random.default_rng(0), 0.5, 20
    ratios = []
    for _ in range(200):
        true, x = rng.normal(), rng.uniform(-1, 1, size=n)
        y = true * x + noise * rng.normal(size=n)
        precision = 1 + (x @ x) / noise**2
        mean, deviation = (x @ y) / noise**2 / precision, precision**-0.5
        kl = 0.5 * (deviation**2 + mean**2 - 1 - math.log(deviation**2))
        theta = mean + deviation * rng.normal(size=(400, 1))
        loss = -log_ratio(y, theta * x, true * x, noise).mean()
        grid = np.linspace(-1, 1, 201)
        d2 = squared_hellinger(theta * grid, true * grid, noise).mean()
        ratios.append(d2 / certificate(n, 1, loss / 2, kl, zeta=0.05))
    assert max(ratios) < 1 and np.median(ratios) > 0.02


# ---- the theorem's terms


def test_rates_by_hand() -> None:
    net = Backbone(layers=1, width=8, inputs=2, weights=33)
    # 66 log 8 / 100 + 33/100 log(2 sqrt(100/33))
    assert net.r_n(100) == pytest.approx(
        0.66 * 2.0794415 + 0.33 * math.log(2 * 1.7407766), rel=1e-6
    )
    assert net.eps_n2(100) == pytest.approx(net.r_n(100) * 21.2075915, rel=1e-6)


def test_the_reference_kl_is_no_constant() -> None:
    """The proof calls it one; sigma_n^2 falls like 1/n, so it grows by G/2 log 2 whenever n
    doubles.
    """
    net = Backbone(layers=1, width=8, inputs=2, weights=33)
    kl = [net.reference_kl(n, bound=3.0, deviation=0.2) for n in (100, 200, 400)]
    assert np.diff(kl) == pytest.approx([33 / 2 * math.log(2)] * 2, rel=1e-6)
    prior, q = Normal(0.0, 0.2), Normal(0.2, math.sqrt(net.reference_variance(100, 3.0)))
    assert kl[0] == pytest.approx(
        33 * float(torch.distributions.kl_divergence(q, prior)), rel=1e-4
    )  # torch in float32


# ---- the experiment

SETTINGS: dict[str, Any] = {
    "seeds": [0], "sizes": [8, 32, 128], "num_clients": 4, "inputs": 2, "true_hidden": 2, "client_deviation": 0.2, "hidden": 3,
    "noise": 0.3, "test_inputs": 100, "samples": 4, "zeta": 0.05, "widths": [1e-3, 3e-2], "weight_bound": 3.0, "rounds": 40,
    "steps_per_round": 10, "batch_size": 16, "lr": 0.02, "momentum": 0.9,
    "variants": {"niw": {"kl_weight": 1.0, "lambda0": 1.0, "precision": "mean", "p_do": 1.0}, "dropout": {"p_do": 0.9}},
    "cells": {"a": {"variants": ["niw"]}, "b": {"hidden": 2}},
}  # fmt: skip


def test_the_experiment_gives_records_and_tables() -> None:
    keys = theorem_generalisation.work(SETTINGS)
    assert [key["variant"] for key in keys] == ["niw", "niw", "dropout"]
    told: list[float] = []
    result = theorem_generalisation.run(
        SETTINGS, keys[0], None, lambda share, text: told.append(share)
    )
    assert told[-1] == 1.0 and result["weights"] == 2 * 3 + 3 + 3 + 1
    records = [{"key": keys[0], "result": json.loads(json.dumps(result))}]
    near, far = result["hellinger"][-1], result["hellinger"][0]
    assert (
        0 < near < 0.5 * far and near < result["global"][-1]
    )  # learns, and each client its own function
    assert all(
        entry["hellinger"] < entry["certificate"]
        for part in ("printed", "best")
        for entry in result[part]
    )
    for n, entry in zip(result["n"], result["best"], strict=True):  # its parts are per client
        assert entry["certificate"] == pytest.approx(
            (entry["loss"] / 2 + entry["kl"] + math.log(20) / 4) / n
        )
    assert all(
        b["certificate"] <= p["certificate"]
        for b, p in zip(result["best"], result["printed"], strict=True)
    )
    tables = theorem_generalisation.tables(SETTINGS, [], records)
    assert len(tables) == 2 and tables[0].row_count == 2
    assert theorem_generalisation.tables(SETTINGS, [], []) == []


def test_clients_are_sampled_from_their_spikes() -> None:
    """A column is dropped with probability 1 - p_do, for each client on its own, and eps is the
    width of the rest.
    """
    problem = problem_of(
        linear(4), regression(6, 6, inputs=4), GaussianRegression(noise=0.4), head=""
    )
    m = torch.full((2, 4), 3.0)
    drawn = torch.stack(
        sample_clients(problem, m, 0.75, 0.1, 4000, torch.Generator().manual_seed(0))
    )
    kept = drawn > 1.5
    assert kept.double().mean((0, 2)).tolist() == pytest.approx([0.75, 0.75], abs=0.02)
    together = (kept[:, 0] == kept[:, 1]).double().mean().item()
    assert together == pytest.approx(0.75**2 + 0.25**2, abs=0.02)
    assert drawn[kept].std().item() == pytest.approx(0.1, rel=0.03)
    assert drawn[~kept].mean().item() == pytest.approx(0.0, abs=0.01)


def test_the_truth_is_the_network_it_says() -> None:
    chosen = {"num_clients": 2, "inputs": 3, "true_hidden": 5, "client_deviation": 0.1}
    truth = Truth.draw(chosen, np.random.default_rng(0))
    x = np.random.default_rng(1).normal(size=(2, 4, 3))
    by_hand = np.tanh(x[1, 2] @ truth.first[1] + truth.shift[1]) @ truth.second[1] + truth.offset[1]
    assert truth(x)[1, 2] == pytest.approx(by_hand)
    assert truth.first[0] == pytest.approx(truth.first[1], abs=0.6)
    assert np.abs(truth.first[0] - truth.first[1]).max() > 0.05
