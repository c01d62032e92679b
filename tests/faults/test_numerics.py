"""Numbers of every size: what enters the posterior is finite, or the run says that it diverges and
keeps its last good round.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import CASES, CLASSES, FEATURES, clients, mlp, plan, problem, seeded
from fault_share import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedhb
from fedhb import distributions
from fedhb.algorithms import NIW, EmpiricalBayes, FedAvg, Mixture
from fedhb.algorithms.empirical_bayes.model import MEASURED
from fedhb.clients.clients import Clients
from fedhb.engine.loop import check_server
from fedhb.errors import DivergedError, InputError
from fedhb.runs import checkpoint
from fedhb.seeding import Randomness

many = settings(max_examples=cases(2000, least=25), database=None, derandomize=True, deadline=None)
SCALES = st.floats(-30, 30).map(lambda e: 10.0**e)
SIZES = (
    st.sampled_from([1, 2, 3, 10, 100, 1000, 10_000])
    if cases(100) < 50
    else st.sampled_from([1, 2, 10, 1000, 10**5, 10**6])
)


def normal(shape: tuple[int, ...], scale: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of this scale, in a type that may not hold them all."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * drawn).to(dtype)


# ---- the formulas


@many
@given(
    scale=SCALES,
    apart=SCALES,
    sigma2=SCALES,
    d=SIZES,
    K=st.integers(1, 20),
    double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_responsibilities_are_shares(scale, apart, sigma2, d, K, double, seed):
    dtype = torch.float64 if double else torch.float32
    m, r = normal((3, d), scale, seed, dtype), normal((K, d), apart, seed + 1, dtype)
    c = distributions.responsibilities(m, r, sigma2)
    assert (
        torch.isfinite(c).all()
        and (c >= 0).all()
        and torch.allclose(c.sum(1), torch.ones(3, dtype=c.dtype))
    )
    penalty = distributions.mixture_penalty(m, r, sigma2)
    assert not penalty.isnan().any()


@many
@given(
    scale=SCALES,
    apart=SCALES,
    K=st.integers(2, 20),
    d=SIZES,
    sigma2=SCALES,
    seed=st.integers(0, 99),
)
def test_a_clients_pull_is_towards_a_mean_of_prototypes(scale, apart, K, d, sigma2, seed):
    """c(j|m) as a client's steps compute it, in single precision: shares, or not numbers, which
    stop the run, but never a wrong share that looks right.
    """
    from fedhb.algorithms.mixture import Nearness

    m, r = (
        normal((2, d), scale, seed, torch.float32),
        normal((K, d), apart, seed + 1, torch.float32),
    )
    c = Nearness(r, sigma2).responsibilities(m)
    for row in c:
        assert row.isnan().any() or (torch.isfinite(row).all() and abs(float(row.sum()) - 1) < 1e-4)


@many
@given(
    scale=SCALES, centre=SCALES, d=SIZES, count=st.integers(1, 20), name=st.sampled_from(["empirical-bayes", "niw", "mixture", "fedavg"]),
    K=st.integers(1, 20), examples=st.sampled_from([1, 2, 100, 100_000]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_servers_step(scale, centre, d, count, name, K, examples, seed):
    """Answers of clients of any scale lead to a finite state, or the round is refused; and a
    variance is above zero.
    """
    model = (
        nn.Sequential(nn.Linear(d, 1, bias=False), nn.Linear(1, 2))
        if d > 1
        else nn.Sequential(nn.Linear(1, 1, bias=False))
    )
    who = Clients.from_arrays([(np.zeros((1, d), dtype=np.float32), np.array([0]))], num_classes=2)
    prob = problem(model, who, head=None if d > 1 else "")
    prob = replace(
        prob, federation=replace(prob.federation, num_clients=1000, num_examples=1000 * examples)
    )
    kinds = {
        "empirical-bayes": EmpiricalBayes(update="body"),
        "niw": NIW(),
        "mixture": Mixture(update="body", num_prototypes=K if d > 1 else 1),
        "fedavg": FedAvg(update="body"),
    }
    algorithm, rng = kinds[name], Randomness(0, 1)
    server = algorithm.start(prob, rng)
    key = {"empirical-bayes": "m0", "niw": "m0", "mixture": "r", "fedavg": "theta"}[name]
    server[key] = normal(tuple(server[key].shape), centre, seed, torch.float32)
    if not torch.isfinite(server[key]).all():
        return
    received = algorithm.broadcast(server, range(count))
    found = {
        "m" if name != "fedavg" else "theta": normal((count, d), scale, seed + 1, torch.float32)
    }
    found |= {
        "examples": torch.full((count,), examples),
        "loss": torch.ones(count),
        "score": torch.ones(count),
    }
    found |= {"kl": torch.ones(count, dtype=torch.float64)} if name == "mixture" else {}
    found |= {"beta": server["beta"].expand(count, -1)} if "beta" in server else {}
    if name == "empirical-bayes":
        found |= {key: torch.ones(count, 1, dtype=torch.float64) for key in MEASURED}
    if not all(torch.isfinite(value).all() for value in found.values()):
        return
    summary = algorithm.summarise(prob, received, found, rng)
    new = algorithm.aggregate(prob, server, {k: v.double() for k, v in summary.items()}, rng)
    try:
        check_server(new, 1)
    except DivergedError as error:
        assert max(scale, centre) > 1e15, (
            error
        )  # squares leave single precision from 1e19 on; a sum of a million before
        return
    if "V0" in new:
        assert (new["V0"] > 0).all()
    drawn = (
        algorithm.sample(prob, new, 2, torch.Generator().manual_seed(0))
        if name != "fedavg"
        else new[key]
    )
    assert not drawn.isnan().any()


# ---- whole runs


def spoiled(who: Clients, client: int, value: float) -> Clients:
    """Return the clients; one of them has inputs that no check has seen."""
    x = who.train.x.clone()
    x[who.train.rows_of(client)[0]] = value
    return replace(who, train=replace(who.train, x=x))


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("name", sorted(CASES))
def test_nothing_that_is_no_number_reaches_the_posterior(name, value, tmp_path):
    """One client of six: the round is refused, whatever the algorithm, and the last good one is
    kept.
    """
    algorithm, out = CASES[name], tmp_path / "run"
    who = replace(clients(), files={"data": "hash"})

    class Spoil:
        def on_start(self, done: int, rounds: int) -> None:
            pass

        def on_round(self, record: dict[str, Any], state: Any) -> None:
            if state.done == 2:
                who.train.x[who.train.rows_of(2)] = value

        def on_end(self) -> None:
            pass

    options = {
        "rounds": 4,
        "fraction": 1.0,
        "batch_size": 4,
        "evaluate_on": None,
        "progress": False,
        "schedule": "constant",
    }
    try:
        run = fedhb.fit(nn_relu(), who, algorithm, out=out, callbacks=[Spoil()], **options)
        assert value == 3e38 and all(
            torch.isfinite(v).all() for v in run.state.server.values() if v.is_floating_point()
        )
        return
    except DivergedError as error:
        assert "round 3" in str(error) or "round 4" in str(error)
    kept = checkpoint.load(out / "checkpoint")[0]
    assert kept.done in (2, 3)
    for arrays in (kept.server, *kept.store.memories.values()):
        assert all(torch.isfinite(v).all() for v in arrays.values() if v.is_floating_point())
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == list(range(1, kept.done + 1))


def nn_relu() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_learning_rate_of_any_size(name):
    """From nothing to far too large: a run ends with finite numbers, or says that it diverges."""
    for exponent in (-30, 3, 30):
        try:
            run = fedhb.fit(
                nn_relu(), clients(), CASES[name], rounds=2, fraction=1.0, batch_size=4, lr=10.0**exponent, progress=False,
                personal_lr=10.0**exponent, personal_epochs=1,
            )  # fmt: skip
        except DivergedError as error:
            assert exponent > 0 and "learning rate" in str(error)
            continue
        assert all(
            torch.isfinite(v).all() for v in run.state.server.values() if v.is_floating_point()
        )
        assert all(
            math.isfinite(v)
            for task in ("global", "personalised")
            for v in run.result[task].values()
            if v is not None
        )


@pytest.mark.filterwarnings("ignore:.*column .* of the inputs")
@many
@given(
    scale=SCALES,
    shift=SCALES,
    sizes=st.lists(st.sampled_from([1, 2, 5, 50]), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_data_of_any_scale(scale, shift, sizes, seed):
    """Inputs are standardised: a run on them is like any other.

    Where single precision cannot hold them, the user is told.
    """
    rng = np.random.default_rng(seed)
    train = [
        (shift + scale * rng.normal(size=(n, FEATURES)), rng.integers(0, CLASSES, n)) for n in sizes
    ]
    try:
        who = Clients.from_arrays(train, train, num_classes=CLASSES, standardise=True)
        run = fedhb.fit(
            mlp(torch.float32),
            who,
            FedAvg(),
            rounds=2,
            fraction=1.0,
            batch_size=4,
            progress=False,
            evaluate_on="test",
        )
    except (InputError, DivergedError) as error:
        assert str(error)
        return
    assert all(torch.isfinite(v).all() for v in run.state.server.values())
    assert all(math.isfinite(v) for v in run.result["global"].values())


@pytest.mark.parametrize("target", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_targets_of_any_scale(target):
    """A regression on targets of any size: finite predictions of that size, or an error that says
    why not.
    """
    rng = np.random.default_rng(0)
    pairs = [
        (
            (x := rng.normal(size=(20, FEATURES)).astype(np.float32)),
            (target * x[:, 0]).astype(np.float64),
        )
        for _ in range(4)
    ]
    try:
        who = Clients.from_arrays(pairs, pairs)
        run = fedhb.fit(
            mlp(torch.float32, outputs=2),
            who,
            FedAvg(),
            rounds=30,
            fraction=1.0,
            batch_size=4,
            progress=False,
        )
    except (InputError, DivergedError) as error:
        assert str(error) and target not in (1.0,)
        return
    assert all(math.isfinite(v) for v in run.result["global"].values())
    assert run.result["global"]["rmse"] < 0.9 * target


@pytest.mark.parametrize("size", [1, 2, 1000, cases(100_000, least=20_000)])
def test_clients_of_any_size(size):
    """Beside each other: one example, and a hundred thousand."""
    rng = np.random.default_rng(1)
    pairs = [
        (rng.normal(size=(n, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, n))
        for n in (size, 1, 5)
    ]
    who = Clients.from_arrays(pairs, num_classes=CLASSES)
    for name in ("niw-full", "mixture-full", "fedavg-full", "fedpa-full", "pfedbayes-full"):
        prob, algorithm = problem(mlp(torch.float32), who), CASES[name]
        server = algorithm.start(prob, Randomness(0))
        received, ids = algorithm.broadcast(server, [0, 1, 2]), [0, 1, 2]
        memory = algorithm.remember(prob, who)
        step = replace(plan(algorithm), epochs=1, batch_size=100)
        found, _ = algorithm.local_update(prob, received, who, memory, step, Randomness(0, 1))
        summary = algorithm.summarise(prob, received, found, Randomness(0, 1))
        check_server(
            algorithm.aggregate(
                prob, server, {k: v.double() for k, v in summary.items()}, Randomness(0, 1)
            ),
            1,
        )
        assert len(ids) == float(summary["count"])
