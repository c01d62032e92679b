"""The lengthened step: exact on one curvature, faster on many, and the usual one where cohorts are noise."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, labelled, mlp, plan_of

from fedhb.algorithms import NIW, Federation, Problem
from fedhb.algorithms.empirical_bayes.server_step import (
    FACTOR,
    LAST,
    along,
    begin,
    factor,
    lengths,
    relaxed,
)
from fedhb.algorithms.empirical_bayes.variances import layer_sizes, steepness, training_time
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness


def descend(
    shares: torch.Tensor, rounds: int, relax: bool, noise: float = 0.0
) -> tuple[torch.Tensor, list[float]]:
    """m0 - m0* after so many rounds that go these shares of the way, and the factors."""
    gap = torch.ones_like(shares)
    server, factors = {"m0": gap, **begin([gap])}, []
    for _ in range(rounds):
        new = {
            "m0": server["m0"]
            - shares * server["m0"]
            + noise * torch.randn(len(shares), dtype=shares.dtype)
        }
        server = new | relaxed(server, new, ["m0"]) if relax else server | new
        factors.append(server[FACTOR].item())
    return server["m0"], factors


@pytest.mark.parametrize("share", [0.5, 0.7, 0.99])
def test_one_curvature_is_solved_by_the_second_step(share: float) -> None:
    """omega_1 = 1/a, which ends at the optimum."""
    gap, factors = descend(torch.full((5,), share, dtype=torch.float64), 2, relax=True)
    assert factors == [1.0, pytest.approx(1 / share)]
    assert gap.abs().max() < 1e-15


def test_it_is_faster_where_the_data_say_little() -> None:
    shares = torch.logspace(-2, 0, 50, dtype=torch.float64)
    plain, longer = (descend(shares, 60, relax)[0].norm() for relax in (False, True))
    assert longer < 0.7 * plain
    _, factors = descend(shares, 2000, relax=True)
    assert all(1.0 <= omega <= 2.0 for omega in factors)
    assert descend(shares, 2000, relax=True)[0].norm() < 1e-6  # and it converges


def test_noise_is_not_lengthened() -> None:
    """Where each cohort moves m0 about and there is nothing to gain, the step is the usual one."""
    torch.manual_seed(0)
    _, factors = descend(
        torch.full((10_000,), 0.5, dtype=torch.float64), 30, relax=True, noise=10.0
    )
    assert factors == [1.0] * 30


def test_factors_by_hand() -> None:
    g = torch.tensor([3.0, 4.0])
    assert factor(g, torch.zeros(2), 1.7) == 1.0  # nothing to compare with
    assert factor(g, g, 1.0) == 2.0 and factor(2 * g, g, 1.0) == 2.0  # as far as it goes
    assert factor(-g, g, 2.0) == 1.0
    assert factor(torch.tensor([-4.0, 3.0]), g, 1.4) == pytest.approx(
        1.4
    )  # neither for nor against
    assert factor(0.2 * g, g, 1.2) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("curvature", "precision"), [(0.0, 3.0), (0.5, 2.0), (2.0, 0.5), (40.0, 10.0)]
)
def test_a_step_as_if_the_prior_had_gone_along(curvature: float, precision: float) -> None:
    """Gradient flow of three clients under a prior that stays at m0, and under one whose mean is theirs at every moment."""
    optima, time, steps = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), 0.3, 30_000
    slopes = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)  # where the loss is linear

    def flow(goes_along: bool) -> float:
        m = torch.zeros(3, dtype=torch.float64)
        for _ in range(steps):
            mean = m.mean() if goes_along else 0.0
            gradient = curvature * (m - optima) if curvature else -slopes
            m = m - time / steps * (gradient + precision * (m - mean))
        return float(m.mean())

    omega = along(torch.tensor([curvature]), torch.tensor([precision]), time).item()
    assert 1.0 < omega < 2.0
    assert omega * flow(False) == pytest.approx(flow(True), rel=1e-3)


@pytest.mark.parametrize(
    ("count", "lambda0", "precision"), [(100, 1.0, 4.0), (5, 1.0, 3.0), (3, 2.0, 1.0)]
)
def test_a_prior_on_mu_is_weight_decay_while_clients_train(
    count: int, lambda0: float, precision: float
) -> None:
    """Gradient flow on slopes from m0 = 2, under a prior that stays there and one whose mean is at every moment N / (N + lambda0)
    times that of the clients. Then the model's own optimum, where m0 stays."""
    slopes, time, steps = torch.linspace(-1.0, 6.0, count, dtype=torch.float64), 0.3, 20_000

    def flow(goes_along: bool) -> float:
        m = torch.full((count,), 2.0, dtype=torch.float64)
        for _ in range(steps):
            mean = count / (count + lambda0) * m.mean() if goes_along else 2.0
            m = m + time / steps * (slopes - precision * (m - mean))
        return float(m.mean())

    zero, share = torch.zeros(1, dtype=torch.float64), lambda0 / (count + lambda0)
    summary = {"curvature": torch.tensor([0.0, count * time]), "count": torch.tensor(float(count))}
    seen = torch.tensor(
        [[9.0], [1.0], [0.0], [0.0], [0.0]], dtype=torch.float64
    )  # nobody has measured a curvature
    server = {"m0": torch.full((1,), 2.0, dtype=torch.float64), "evidence": seen}
    omega, lost = lengths(server, summary, [1], zero + precision, share)
    assert 1.0 < omega.item() < 2.0 and lost.item() > 1e-3
    reached = relaxed(server | begin([zero]), {"m0": zero + flow(False)}, ["m0"], (omega, lost))[
        "m0"
    ].item()
    assert reached == pytest.approx(flow(True), rel=1e-4)
    # d/dmu of lambda0 precision / 2 mu^2 at mu = N / (N + lambda0) m0 is the slopes' sum
    server["m0"] = (slopes.mean() / (share * precision)).reshape(1)
    step = -torch.expm1(torch.tensor(-time * precision)) / precision * slopes.mean()
    stays = relaxed(server | begin([zero]), {"m0": server["m0"] + step}, ["m0"], (omega, lost))[
        "m0"
    ]
    torch.testing.assert_close(stays, server["m0"], rtol=1e-6, atol=0.0)


def test_lengths_at_their_ends() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert along(3 * one, 0 * one, 0.5).item() == 1.0  # no prior
    assert along(3 * one, 2 * one, 0.0).item() == 1.0  # no training
    assert along(1e9 * one, one, 0.5).item() == pytest.approx(1.0)  # the data have the last word
    assert along(4 * one, one, 1e6).item() == pytest.approx(1.25)  # training converges
    assert along(0 * one, 1e9 * one, 0.5).item() == 2.0  # as far as it goes


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_servers_step_is_as_long_as_the_prior_asks(update: str) -> None:
    """Layer by layer, with the evidence and the prior that the clients were sent; no step before it, so none to agree with."""
    network, clients = Network(mlp(4, 6, 3)), labelled(6, 7)
    problem = Problem(network, Categorical(3), Federation(2, 13, 3))
    plain, longer = NIW(update=update, relax=False), NIW(update=update, along=True)
    counts = layer_sizes(network, update == "full")
    server = longer.start(problem, RNG)
    server["V0"] = torch.full_like(server["V0"], 0.5 * 16.0)  # n0 = 16, a precision of 2
    server["evidence"] = torch.rand(
        5, len(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    received = longer.broadcast(server, [0, 1])
    plan = plan_of(epochs=2, lr=0.3, train_head=update == "full")
    found, _ = longer.local_update(problem, received, clients, {}, plan, RNG)
    summary = longer.summarise(problem, received, found, RNG)
    usual, new = (one.aggregate(problem, dict(server), summary, RNG) for one in (plain, longer))
    precision = torch.full((len(counts),), 2.0, dtype=torch.float64)
    omega, lost = lengths(server, summary, counts, precision, 0.0)
    assert not lost.any()
    time = training_time(clients.sizes, plan).mean().item()
    first = along(steepness(server["evidence"], counts), precision, time)
    torch.testing.assert_close(omega[0].item(), first[0].item(), rtol=1e-6, atol=0.0)
    assert omega.unique().numel() > 1 and 1.0 < omega.max() <= 2.0
    assert new[FACTOR].item() == 1.0
    for key, part in zip(
        ("m0", "head"),
        omega.split([network.num_params, len(omega) - network.num_params]),
        strict=True,
    ):
        if len(part):
            torch.testing.assert_close(
                new[key], server[key] + part.to(new[key]) * (usual[key] - server[key])
            )
    # of clients that go on from where they were the prior has taken another share
    elsewhere = NIW(update=update, along=True, begin="last").aggregate(
        problem, dict(server), summary, RNG
    )
    torch.testing.assert_close(elsewhere["m0"], usual["m0"])


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_servers_second_step(update: str) -> None:
    """The first round is that of the closed form; the second moves m0 and the head omega times as far. None of it is sent."""
    network = Network(mlp(4, 6, 3))
    clients = labelled(6, 7)
    problem = Problem(network, Categorical(3), Federation(2, 13, 3))
    plain, longer = NIW(update=update, relax=False), NIW(update=update, relax=True, along=False)
    server, other = (one.start(problem, RNG) for one in (plain, longer))
    assert plain.broadcast(server, [0]).keys() == longer.broadcast(other, [0]).keys()
    keys = [key for key in ("m0", "head") if key in server]
    steps = []
    for number in (1, 2):
        rng = Randomness(0, number)
        received = longer.broadcast(other, [0, 1])
        found, _ = longer.local_update(
            problem,
            received,
            clients,
            {},
            plan_of(epochs=1, lr=0.02, train_head=update == "full"),
            rng,
        )
        summary = longer.summarise(problem, received, found, rng)
        usual = plain.aggregate(problem, {key: other[key] for key in server}, summary, rng)
        new = longer.aggregate(problem, other, summary, rng)
        steps.append(torch.cat([usual[key] - other[key] for key in keys]))
        omega = 1.0 if number == 1 else factor(steps[1], steps[0], 1.0)
        assert new[FACTOR].item() == pytest.approx(omega) and torch.allclose(new[LAST], steps[-1])
        for key in keys:
            torch.testing.assert_close(new[key], other[key] + omega * (usual[key] - other[key]))
        assert torch.equal(new["V0"], usual["V0"])
        other = new
    assert omega > 1.0  # or the second round has shown nothing
