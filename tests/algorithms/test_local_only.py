"""Local training alone: no influence between clients, and whose models the server averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    batch_normed,
    labelled,
    linear,
    mlp,
    plan_of,
    problem_of,
    regression,
    same_bits,
    seeded,
    vector_problem,
)
from torch import nn

import fedhb
from fedhb.algorithms import Arrays, FedAvg, Problem
from fedhb.algorithms.contract import Personalised
from fedhb.algorithms.local_only import LocalOnly
from fedhb.algorithms.toolbox import add
from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import SERVER, Randomness

IDS = (4, 17, 2, 99, 8)


TRAINING = {
    "fraction": 0.6,
    "local_epochs": 2,
    "batch_size": 4,
    "lr": 0.1,
    "seed": 2,
    "progress": False,
}


def some_clients() -> Clients:
    """With ids that are not positions, as where other clients are held out."""
    return replace(labelled(9, 6, 4, 7, 8), ids=torch.tensor(IDS))


def test_a_client_goes_on_where_it_stopped() -> None:
    """On full batches without momentum, three rounds of two epochs are one of six."""
    clients, algorithm = labelled(9, 6), LocalOnly(update="full")
    problem, plan = (
        problem_of(mlp(4, 5, 3), clients),
        plan_of(epochs=2, batch_size=9, momentum=0.0, train_head=True),
    )
    received, memory = (
        algorithm.broadcast(algorithm.start(problem, RNG), [0, 1]),
        algorithm.remember(problem, clients),
    )
    whole, _ = algorithm.local_update(
        problem, received, clients, memory, replace(plan, epochs=6), RNG
    )
    for number in (1, 2, 3):
        found, memory = algorithm.local_update(
            problem, received, clients, memory, plan, Randomness(0, number)
        )
    for key in ("theta", "head"):
        torch.testing.assert_close(
            found[key], whole[key], rtol=0, atol=1e-14
        )  # sums of nine numbers in another order
        assert torch.equal(memory[key], found[key])


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_clients_do_not_influence_each_other(make: Any, update: str) -> None:
    clients, algorithm, stranger = some_clients(), LocalOnly(update=update), 17
    other = clients.train.x.clone()
    other[clients.train.rows_of(IDS.index(stranger))] *= -3.0
    changed = replace(clients, train=replace(clients.train, x=other))
    module = make()
    models = fedhb.fit(module, clients, algorithm, rounds=6, **TRAINING).state.store.memories
    others = fedhb.fit(module, changed, algorithm, rounds=6, **TRAINING).state.store.memories
    assert models.keys() == others.keys() == set(IDS)
    for i in IDS:
        assert same_bits(models[i], others[i]) == (i != stranger)
        assert not torch.equal(models[i]["theta"], models[IDS[IDS.index(i) - 1]]["theta"])


def test_a_client_that_never_took_part_begins_at_the_initial_network() -> None:
    clients = labelled(9, 6)
    problem, plan = problem_of(batch_normed(), clients), plan_of(epochs=3, train_head=True)

    def personal(algorithm: Any) -> Personalised:
        server = algorithm.start(problem, RNG)
        return algorithm.personalise(
            problem, server, clients, algorithm.remember(problem, clients), plan, RNG
        )

    for update in ("body", "full"):
        mine = personal(LocalOnly(update=update))
        assert same_bits(mine.arrays(), personal(FedAvg(update=update)).arrays())
        assert ((mine.head[:, 0] - problem.network.head).abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_the_server_holds_every_clients_latest_model(make: Any, update: str) -> None:
    """Where there are as many places as clients, after enough rounds for all to have drawn a place
    alone.
    """
    module, clients = make(), some_clients()
    run = fedhb.fit(module, clients, LocalOnly(update=update, num_models=6), rounds=12, **TRAINING)
    server, memories = run.state.server, run.state.store.memories
    owners = [i for i in server["owner"].tolist() if i != SERVER]
    assert sorted(owners) == sorted(IDS)
    assert ("head" in server) == (update == "full") and ("buffers" in server) == (
        make is batch_normed
    )
    for k, i in enumerate(server["owner"].tolist()):
        if i != SERVER:
            assert same_bits({key: server[key][k] for key in memories[i]}, memories[i])
            assert all(
                not torch.equal(value, getattr(run.problem.network, key))
                for key, value in memories[i].items()
            )
    # The mean of the clients' own probabilities.
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(7, 4))).float()
    each = [
        run.problem.network.outputs(weights_of(run.problem, memories[i]), x.unsqueeze(0))[
            0
        ].softmax(-1)
        for i in IDS
    ]
    mean = torch.stack(each).mean(0).numpy()
    tolerance = 1e-6 if mean.dtype == np.float32 else 1e-14  # a few units in the last place
    np.testing.assert_allclose(run.predict(x), mean, rtol=0, atol=tolerance)


def weights_of(problem: Problem, memory: Arrays) -> Any:
    return fedhb.network.Weights(
        *(
            memory.get(key, getattr(problem.network, key)).unsqueeze(0)
            for key in ("theta", "head", "buffers")
        )
    )


def test_real_targets_are_predicted_by_the_mixture() -> None:
    """The mean of the means; the noise, and the spread of the means."""
    clients = regression(6, 6, 6, inputs=2, spread=2.0)
    problem, algorithm = (
        problem_of(linear(2), clients, GaussianRegression(noise=0.5)),
        LocalOnly(num_models=4),
    )
    server = algorithm.start(problem, RNG)
    theta = torch.tensor([[1.0, 0.0], [0.0, 3.0], [5.0, 5.0], [2.0, -1.0]], dtype=torch.float64)
    server |= {"theta": theta, "owner": torch.tensor([7, 3, SERVER, 12])}
    mean, variance = algorithm.predict(problem, server, torch.ones(1, 2), RNG)[0]
    assert mean.item() == pytest.approx((1 + 3 + 1) / 3, rel=1e-15)
    assert variance.item() == pytest.approx(0.25 + 8 / 9, rel=1e-15)  # means 1, 3, 1 around 5/3


def answers(ids: Any, d: int = 2) -> Arrays:
    """Models by which a client can be told: theta = (id, 1)."""
    ids = torch.as_tensor(ids)
    theta = torch.stack([ids.double(), *[torch.ones(len(ids), dtype=torch.float64)] * (d - 1)], 1)
    return {"theta": theta, "client": ids, "examples": torch.ones(len(ids), dtype=torch.float64)}


def one_round(
    algorithm: LocalOnly,
    problem: Problem,
    server: Arrays,
    ids: Any,
    rng: Randomness,
    chunk: int = 99,
) -> Arrays:
    total = None
    for part in torch.as_tensor(ids).split(chunk):
        total = add(
            total,
            algorithm.summarise(
                problem, algorithm.broadcast(server, part.tolist()), answers(part), rng
            ),
        )
    assert total is not None
    return algorithm.aggregate(problem, server, total, rng)


def test_places_have_one_owner_each_and_owners_one_place() -> None:
    N, algorithm = 30, LocalOnly(num_models=7)
    problem = vector_problem(2, num_clients=N, num_examples=N)
    ids = (torch.randperm(100, generator=torch.Generator().manual_seed(0))[:N]).tolist()
    server = algorithm.start(problem, RNG)
    for number in range(1, 80):
        rng = Randomness(3, number)
        chosen = torch.randperm(N, generator=rng(SERVER, "cohort"))[
            : 10 if number % 2 else N
        ].tolist()
        cohort = [ids[k] for k in chosen]
        new = one_round(algorithm, problem, server, cohort, rng)
        for chunk in (1, 4):  # whoever is summed with whom
            assert same_bits(one_round(algorithm, problem, server, cohort[::-1], rng, chunk), new)
        owners = new["owner"].tolist()
        held = [i for i in owners if i != SERVER]
        assert len(set(held)) == len(held) and set(held) <= set(ids)
        for before, now, theta in zip(server["owner"].tolist(), owners, new["theta"], strict=True):
            assert now == before or (before == SERVER and now in cohort)
            assert torch.equal(
                theta, torch.tensor([now, 1.0]) if now != SERVER else problem.network.theta
            )
        server = new
    assert (
        len(held) == 7
    )  # a free place is taken in a round of all with probability 1/e, so in 40 of them surely


@pytest.mark.parametrize(("N", "M"), [(4, 8), (40, 8)])
def test_as_many_clients_draw_as_there_are_places(N: int, M: int) -> None:
    """On average one client draws each, where all take part; or all clients draw, if they are fewer
    than the places.
    """
    algorithm, problem = LocalOnly(num_models=M), vector_problem(2, num_clients=N, num_examples=N)
    owner, rounds = algorithm.start(problem, RNG)["owner"], 200
    drawn = sum(
        algorithm.places(problem, owner, range(N), Randomness(1, number))
        for number in range(rounds)
    )
    expected = (
        rounds * min(N, M) / M
    )  # by place; a Poisson variable or narrower, within five deviations
    assert ((drawn.sum(0) - expected).abs() < 5 * expected**0.5).all()
    assert N > M or (drawn.sum(1) == rounds).all()


def test_owners_are_a_fair_sample_of_the_clients() -> None:
    N, M, seeds = 6, 2, 400
    algorithm, problem = LocalOnly(num_models=M), vector_problem(2, num_clients=N, num_examples=N)
    owned = torch.zeros(N)
    for seed in range(seeds):
        server, number = algorithm.start(problem, RNG), 0
        while (server["owner"] == SERVER).any():
            number += 1
            rng = Randomness(seed, number)
            cohort = torch.randperm(N, generator=rng(SERVER, "cohort"))[:4].sort().values
            server = one_round(algorithm, problem, server, cohort, rng)
        owned[server["owner"]] += 1
    p = M / N
    assert (
        (owned - seeds * p).abs() < 4 * (seeds * p * (1 - p)) ** 0.5
    ).all()  # six binomials within four deviations


def test_before_anybody_owns_a_place_the_initial_network_predicts() -> None:
    clients = labelled(9, 6)
    problem, algorithm = problem_of(mlp(4, 5, 3), clients), LocalOnly(num_models=1, update="body")
    server, x = algorithm.start(problem, RNG), clients.train.x[:5]
    plain = mlp(4, 5, 3)(x.double()).softmax(-1).detach()
    torch.testing.assert_close(
        algorithm.predict(problem, server, x, RNG), plain, rtol=0, atol=1e-14
    )
    # Two clients draw the one place: both, and it stays free with the initial network in it; or
    # one, and it is that one's.
    outcomes = set()
    for number in range(1, 30):
        rng = Randomness(0, number)
        chosen = algorithm.places(problem, server["owner"], [0, 1], rng)
        assert chosen.shape == (2, 1)
        sums = {"places": chosen.sum(0), "owner": chosen.T @ torch.tensor([0.0, 1.0]).double()}
        new = algorithm.aggregate(
            problem, server, sums | {"theta": torch.full_like(server["theta"], 9.0)}, rng
        )
        outcomes.add((int(chosen.sum()), new["owner"].item()))
        assert torch.equal(new["theta"][0], problem.network.theta) == (
            new["owner"].item() == SERVER
        )
    assert outcomes == {(0, SERVER), (1, 0), (1, 1), (2, SERVER)}


def test_nothing_is_sent() -> None:
    run = fedhb.fit(mlp(4, 5, 3), some_clients(), LocalOnly(), rounds=2, **TRAINING)
    nothing = {"down_bytes": 0, "up_bytes": 0}
    assert run.result["communication"] == {**nothing, "per_client_round": nothing}


def test_it_learns_the_digits() -> None:
    clients = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=4, seed=0
    )
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options = {
        "rounds": 10,
        "fraction": 0.5,
        "batch_size": 20,
        "lr": 0.05,
        "personal_epochs": 2,
        "progress": False,
    }
    result = fedhb.fit(model, clients, LocalOnly(), **options).result
    # Chance is 0.1. A client knows its four digits; the mean of ten such networks knows something
    # of all.
    assert result["personalised"]["accuracy"] > 0.9
    assert 0.6 < result["global"]["accuracy"] < result["personalised"]["accuracy"]
