"""The ensemble baselines: one model is FedAvg, each group is a FedAvg of its own, and who predicts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    examples,
    labelled,
    linear,
    mlp,
    normal,
    plan_of,
    problem_of,
    regression,
    seeded,
)
from torch import nn

import fedhb
from fedhb.algorithms import FedAvg
from fedhb.algorithms.ensemble import Ensemble
from fedhb.algorithms.several_networks import learner_of
from fedhb.algorithms.toolbox import num_bytes
from fedhb.likelihood import GaussianRegression

TRAINING: dict[str, Any] = {
    "rounds": 3,
    "fraction": 0.6,
    "local_epochs": 2,
    "batch_size": 4,
    "seed": 2,
    "progress": False,
}
SIZES = (9, 6, 4, 7, 8, 5)


def batch_normed() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    )


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("mode", ["preset", "ensemble"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_one_model_is_fedavg_bit_for_bit(make, mode: str, update: str, weighted: bool) -> None:
    module, clients = make(), labelled(*SIZES)
    run = fedhb.fit(
        module,
        clients,
        Ensemble(num_models=1, mode=mode, update=update, weighted=weighted),
        **TRAINING,
    )
    fedavg = fedhb.fit(module, clients, FedAvg(update=update, weighted=weighted), **TRAINING)
    server, theirs = run.state.server, fedavg.state.server
    assert server.keys() == theirs.keys() and all(
        torch.equal(server[key][0], theirs[key]) for key in theirs
    )
    x, y = labelled(6, seed=1).train.examples(0)
    assert np.array_equal(run.predict(x), fedavg.predict(x))
    assert np.array_equal(run.personalise(x, y).predict(x), fedavg.personalise(x, y).predict(x))
    assert [(r["loss"], r["score"]) for r in run.records] == [
        (r["loss"], r["score"]) for r in fedavg.records
    ]
    assert run.state.traffic == fedavg.state.traffic and run.state.store.memories == {}


# ---- groups


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_groups_are_equal_and_follow_no_pattern(count: int) -> None:
    algorithm = Ensemble(num_models=count)
    ids = list(range(-2 * count, 40 * count))  # new clients have negative ids
    groups = algorithm.groups(ids).tolist()
    assert all(set(groups[k : k + count]) == set(range(count)) for k in range(0, len(ids), count))
    assert algorithm.groups(ids[::-1]).tolist() == groups[::-1]  # of the id alone
    if (
        count > 1
    ):  # ids that are equal modulo K are in all groups: 42 draws from K with the same result have a chance of 2^-41
        assert all(len(Counter(groups[k::count])) == count for k in range(count))


@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_each_group_is_a_fedavg_of_its_own(make, update: str) -> None:
    """Three rounds in which all clients take part, against FedAvg on the clients of each group from that group's start."""
    clients, plan = labelled(*SIZES), plan_of(epochs=2, train_head=update == "full")
    problem = problem_of(make(), clients)
    algorithm, fedavg = Ensemble(num_models=3, update=update), FedAvg(update=update)
    server = start = algorithm.start(problem, RNG)
    ids = clients.ids.tolist()
    for _ in range(3):
        received = algorithm.broadcast(server, ids)
        found, memory = algorithm.local_update(problem, received, clients, {}, plan, RNG)
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, RNG), RNG
        )
        assert memory == {}
    for j in range(3):
        members = [k for k, group in enumerate(algorithm.groups(ids).tolist()) if group == j]
        assert len(members) == 2
        theirs = learner_of(start, j)
        for _ in range(3):
            found, _ = fedavg.local_update(problem, theirs, clients.select(members), {}, plan, RNG)
            theirs = fedavg.aggregate(
                problem, theirs, fedavg.summarise(problem, theirs, found, RNG), RNG
            )
        for key, value in theirs.items():
            # Batched products of six clients or of two may be summed in another order, at some steps.
            torch.testing.assert_close(server[key][j], value, rtol=0, atol=1e-13)
            assert key == "buffers" or (value - start[key][j]).abs().max() > 1e-2


def test_a_group_without_participants_keeps_its_model() -> None:
    clients, plan = labelled(*SIZES), plan_of(epochs=2)
    problem = problem_of(batch_normed(), clients)
    algorithm = Ensemble(num_models=3)
    server = algorithm.start(problem, RNG)
    groups = algorithm.groups(range(6)).tolist()
    cohort = [k for k in range(6) if groups[k] != 1]
    received = algorithm.broadcast(server, cohort)
    found, _ = algorithm.local_update(problem, received, clients.select(cohort), {}, plan, RNG)
    summary = algorithm.summarise(problem, received, found, RNG)
    after = algorithm.aggregate(problem, server, summary, RNG)
    for key in ("theta", "buffers"):
        assert torch.equal(after[key][1], server[key][1])
        assert all((after[key][j] - server[key][j]).abs().max() > 1e-3 for j in (0, 2))
    sizes = [sum(SIZES[k] for k in cohort if groups[k] == j) for j in range(3)]
    assert algorithm.report(problem, server, summary)["groups"] == pytest.approx(
        [n / sum(sizes) for n in sizes]
    )


def test_groups_average_exact_solutions_by_size() -> None:
    """Least squares, solved to the end by each client: a group's network is the mean of its clients' solutions by size."""
    clients = regression(6, 5, 9, 7)
    problem = problem_of(linear(3), clients, GaussianRegression(noise=1.0))
    algorithm, plan = Ensemble(), plan_of(epochs=700, batch_size=9)  # full batches
    server = algorithm.start(problem, RNG)
    received = algorithm.broadcast(server, range(4))
    found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
    after = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, received, found, RNG), RNG
    )
    groups = algorithm.groups(range(4)).tolist()
    for j in range(2):
        total, weight = torch.zeros(3, dtype=torch.float64), 0
        for k in range(4):
            if groups[k] == j:
                x, y = examples(clients, k)
                total += len(x) * torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0]
                weight += len(x)
        # Directions whose curvature times lr is above (1 - sqrt(0.9))^2 = 0.003 (here 0.007 and more) converge as sqrt(0.9)^700
        # = 1e-16; what remains are roundings of numbers near one, divided by curvatures of 0.07 and more.
        torch.testing.assert_close(after["theta"][j], total / weight, rtol=0, atol=1e-12)


def test_a_client_is_sent_one_network() -> None:
    problem = problem_of(mlp(4, 5, 3), labelled(9, 6))
    d, h = problem.network.num_params, len(problem.network.head)
    for update, numbers in (("body", d), ("full", d + h)):
        algorithm = Ensemble(num_models=5, update=update)
        sent = algorithm.broadcast(algorithm.start(problem, RNG), [4, 0, 7])
        assert set(sent) <= set(algorithm.each) and all(len(value) == 3 for value in sent.values())
        assert num_bytes(sent) == 3 * numbers * 8


# ---- who predicts


@pytest.mark.parametrize("update", ["body", "full"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_prediction_by_the_groups_network_or_by_all(make, update: str) -> None:
    clients, x = labelled(*SIZES), normal(7, 4, seed=1)
    problem = problem_of(make(), clients)
    preset, ensemble = (
        Ensemble(num_models=3, mode=mode, update=update, noise=0.0)
        for mode in ("preset", "ensemble")
    )
    server = preset.start(problem, RNG)
    single = [
        FedAvg(update=update).predict(problem, learner_of(server, j), x, RNG) for j in range(3)
    ]
    together = torch.stack(single).mean(0)
    for k, j in enumerate(preset.groups(range(6)).tolist()):
        memory = preset.remember(problem, clients.select([k]))
        # Three networks at once, or one: products in another order.
        torch.testing.assert_close(
            preset.predict(problem, server, x, RNG, memory), single[j], rtol=0, atol=1e-14
        )
    assert ensemble.remember(problem, clients) == {}
    for algorithm, memory in ((ensemble, None), (ensemble, {}), (preset, None)):
        torch.testing.assert_close(
            algorithm.predict(problem, server, x, RNG, memory), together, rtol=0, atol=1e-14
        )
    assert (single[0] - single[1]).abs().max() > 1e-2


@pytest.mark.parametrize("update", ["body", "full"])
def test_personalisation_tunes_the_groups_network_or_all(update: str) -> None:
    clients, plan = labelled(*SIZES), plan_of(epochs=3, train_head=True)
    problem = problem_of(mlp(4, 5, 3), clients)
    preset, ensemble = (
        Ensemble(num_models=3, mode=mode, update=update, noise=0.0)
        for mode in ("preset", "ensemble")
    )
    server = preset.start(problem, RNG)
    fedavg = FedAvg(update=update)
    tuned = [
        fedavg.personalise(problem, learner_of(server, j), clients, {}, plan, RNG) for j in range(3)
    ]
    all_three = ensemble.personalise(problem, server, clients, {}, plan, RNG)
    x = normal(6, 5, 4, seed=2)
    each = torch.stack([t.predict(x) for t in tuned])
    # Nine steps or fewer with products in another order.
    torch.testing.assert_close(all_three.predict(x), each.mean(0), rtol=0, atol=1e-12)
    mine = preset.personalise(
        problem, server, clients, preset.remember(problem, clients), plan, RNG
    ).predict(x)
    for k, j in enumerate(preset.groups(range(6)).tolist()):
        torch.testing.assert_close(mine[k], each[j, k], rtol=0, atol=1e-12)
    head = problem.network.head if update == "body" else server["head"]
    assert ((all_three.head - head).abs().amax(2) > 1e-3).all()


# ---- learning


@pytest.mark.parametrize("mode", ["preset", "ensemble"])
def test_it_learns_the_digits(mode: str) -> None:
    clients = fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=10, shards_per_client=5, seed=0
    )
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ).float()
    options: dict[str, Any] = {
        "rounds": 12,
        "fraction": 0.5,
        "local_epochs": 2,
        "batch_size": 20,
        "progress": False,
    }
    run = fedhb.fit(module, clients, Ensemble(mode=mode, update="full"), **options)
    assert (
        run.result["global"]["accuracy"] > 0.7 and run.result["personalised"]["accuracy"] > 0.75
    )  # chance is 0.1
    novel = dataclasses.replace(clients.select([3]), ids=torch.tensor([77]))
    assert (
        run.evaluate(novel)["personalised"]["accuracy"] > 0.4
    )  # a client that never took part has a group too
