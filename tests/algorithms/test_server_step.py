"""The server's lengthened step: its factor and its length."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, labelled, mlp, plan_of

from fedhb.algorithms import NIW, Federation, Problem
from fedhb.algorithms.empirical_bayes.server_step import FACTOR, LAST, along, factor, lengths
from fedhb.algorithms.empirical_bayes.variances import layer_sizes, steepness, training_time
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness


def test_factors_by_hand() -> None:
    g = torch.tensor([3.0, 4.0])
    assert factor(g, torch.zeros(2), 1.7) == 1.0  # nothing to compare with
    assert factor(g, g, 1.0) == 2.0 and factor(2 * g, g, 1.0) == 2.0  # as far as it goes
    assert factor(-g, g, 2.0) == 1.0
    assert factor(torch.tensor([-4.0, 3.0]), g, 1.4) == pytest.approx(
        1.4
    )  # neither for nor against
    assert factor(0.2 * g, g, 1.2) == pytest.approx(1.5)


def test_lengths_at_their_ends() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert along(3 * one, 0 * one, 0.5).item() == 1.0  # no prior
    assert along(3 * one, 2 * one, 0.0).item() == 1.0  # no training
    assert along(1e9 * one, one, 0.5).item() == pytest.approx(1.0)  # the data have the last word
    assert along(4 * one, one, 1e6).item() == pytest.approx(1.25)  # training converges
    assert along(0 * one, 1e9 * one, 0.5).item() == 2.0  # as far as it goes


@pytest.mark.parametrize("update", ["body", "full"])
def test_the_servers_step_is_as_long_as_the_prior_asks(update: str) -> None:
    """Layer by layer, with the evidence and the prior that the clients were sent; no step before
    it, so none to agree with.
    """
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
    """The first round is that of the closed form; the second moves m0 and the head omega times as
    far.

    None of it is sent.
    """
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
