"""The ensembles: groups of clients, and who predicts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from problems import RNG, batch_normed, labelled, mlp, normal, plan_of, problem_of, seeded
from torch import nn

import fedhb
from fedhb.algorithms import FedAvg
from fedhb.algorithms.ensemble import Ensemble
from fedhb.algorithms.several_networks import learner_of
from fedhb.algorithms.toolbox import received_bytes

SIZES = (9, 6, 4, 7, 8, 5)


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


def test_a_client_is_sent_one_network() -> None:
    problem = problem_of(mlp(4, 5, 3), labelled(9, 6))
    d, h = problem.network.num_params, len(problem.network.head)
    for update, numbers in (("body", d), ("full", d + h)):
        algorithm = Ensemble(num_models=5, update=update)
        sent = algorithm.broadcast(algorithm.start(problem, RNG), [4, 0, 7])
        assert set(sent) <= set(algorithm.each) and all(len(value) == 3 for value in sent.values())
        assert received_bytes(algorithm, sent, 3) == 3 * numbers * 8


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
