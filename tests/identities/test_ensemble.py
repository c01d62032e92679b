"""The ensembles: one model is FedAvg, and each group is a FedAvg of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    TRAINING,
    batch_normed,
    examples,
    labelled,
    linear,
    mlp,
    plan_of,
    problem_of,
    regression,
)

import fedhb
from fedhb.algorithms import FedAvg
from fedhb.algorithms.ensemble import Ensemble
from fedhb.algorithms.several_networks import learner_of
from fedhb.likelihood import GaussianRegression

SIZES = (9, 6, 4, 7, 8, 5)


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


@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_each_group_is_a_fedavg_of_its_own(make, update: str) -> None:
    """Three rounds in which all clients take part, against FedAvg on the clients of each group from
    that group's start.
    """
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
            # Batched products of six clients or of two may be summed in another order, at some
            # steps.
            torch.testing.assert_close(server[key][j], value, rtol=0, atol=1e-13)
            assert key == "buffers" or (value - start[key][j]).abs().max() > 1e-2


def test_groups_average_exact_solutions_by_size() -> None:
    """Least squares, solved to the end by each client: a group's network is the mean of its
    clients' solutions by size.
    """
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
        # Directions whose curvature times lr is above (1 - sqrt(0.9))^2 = 0.003 (here 0.007 and
        # more) converge as sqrt(0.9)^700 = 1e-16; what remains are roundings of numbers near one,
        # divided by curvatures of 0.07 and more.
        torch.testing.assert_close(after["theta"][j], total / weight, rtol=0, atol=1e-12)
