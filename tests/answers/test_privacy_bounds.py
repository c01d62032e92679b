"""Sums under differential privacy: bounded contributions, and a posterior that stays one."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("dp_accounting")

import builders
from private_answers import PRIVATE, RNG, answers, length, privacy

import fedhb
from fedhb.algorithms.empirical_bayes.model import MEASURED
from fedhb.answers.privacy import Private


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("clip", [1e-3, 0.05, 2.0])
def test_no_client_contributes_more_than_the_bound(name, clip):
    algorithm = PRIVATE[name]
    problem, _, received, found = answers(algorithm)
    private = Private(algorithm, privacy(clip=clip))
    for c in range(len(found["examples"])):
        one = {key: value[c : c + 1] for key, value in found.items()}
        for grown in (
            one,
            {k: v * 1e6 if k in ("m", "theta", "beta", "head") else v for k, v in one.items()},
        ):
            sums = private.summarise(problem, received, grown, RNG)
            assert length(sums) <= private.bound() * (1 + 1e-9)
            assert not {"loss", "score", "kl"} & sums.keys()


@pytest.mark.parametrize("name", PRIVATE)
def test_a_wide_clip_and_no_noise_change_nothing_but_the_weights(name):
    """Without clipping and noise, equal clients: the algorithm's own update."""
    algorithm = PRIVATE[name]
    problem, server, received, found = answers(algorithm)
    found["examples"] = torch.ones_like(found["examples"])
    private = Private(algorithm, privacy(clip=1e6, noise=0.0))
    ours = private.aggregate(problem, server, private.summarise(problem, received, found, RNG), RNG)
    plain = {
        k: v
        for k, v in algorithm.summarise(problem, received, found, RNG).items()
        if k not in private.release.withheld
    }
    held = {
        k: torch.zeros_like(v)
        for k, v in algorithm.summarise(problem, received, found, RNG).items()
        if k in private.release.withheld
    }
    theirs = algorithm.aggregate(problem, server, plain | held, RNG)
    builders.assert_close(ours, theirs, 1e-9, name)


def test_niws_contribution_is_bounded_as_derived():
    """|d| <= C gives |(d, d^2)| <= sqrt(C^2 + C^4), reached by a difference in one coordinate
    alone.
    """
    algorithm, clip = fedhb.NIW(dof="full", update="body"), 1.7
    problem, _, received, found = answers(algorithm)
    one = {key: value[:1].clone() for key, value in found.items()}
    one["m"] = received["m0"].unsqueeze(0).clone()
    one["m"][0, 0] += 100.0
    private = Private(algorithm, privacy(clip=clip))
    sums = private.summarise(problem, received, one, RNG)
    assert float(sums["m"].norm()) == pytest.approx(clip) and float(
        sums["squares"].norm()
    ) == pytest.approx(clip**2)
    assert (
        length(sums)
        == pytest.approx(math.sqrt(clip**2 + clip**4))
        == pytest.approx(private.bound())
    )


def test_what_a_learned_prior_would_learn_from_is_not_released():
    """Under noise it would be learned from noise: squares and measurements are zero, and the prior
    stays what it was.
    """
    algorithm = fedhb.EmpiricalBayes()
    problem, server, received, found = answers(algorithm)
    withheld = {"squares", "head_squares", *MEASURED}
    assert all(found[key].any() for key in MEASURED if not key.startswith("reach"))
    private = Private(algorithm, privacy(noise=50.0, clip=1.0))
    sums = private.summarise(problem, received, found, RNG)
    assert withheld <= sums.keys() and not any(sums[key].any() for key in withheld)
    new = private.aggregate(problem, server, sums, RNG)
    assert torch.equal(new["V0"], server["V0"]) and not torch.equal(new["m0"], server["m0"])


def test_v0_stays_positive_under_any_noise():
    algorithm = fedhb.NIW(dof="full", update="body")
    problem, server, received, found = answers(algorithm)
    private = Private(algorithm, privacy(noise=100.0, clip=1.0))
    new = private.aggregate(problem, server, private.summarise(problem, received, found, RNG), RNG)
    zeros = torch.zeros_like(received["m0"], dtype=torch.float64)
    floor = algorithm.scale_matrix(problem, zeros, zeros)
    assert (new["V0"] >= floor * (1 - 1e-6)).all() and torch.isfinite(new["m0"]).all()
