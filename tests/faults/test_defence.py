"""Hostile and broken clients: what they send is refused, shortened or outvoted, whatever the
algorithm.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CASES, arrays, assert_close, clients, mlp, plan, problem, same_bits

import fedhb
from fedhb.algorithms.empirical_bayes.model import MEASURED
from fedhb.answers.defence import DEFAULT, Defence, Defended, held
from fedhb.answers.hostile import ATTACKS, Hostile, attacked, choose
from fedhb.clients.clients import Clients
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.engine.workers import Workers
from fedhb.errors import DivergedError, InputError
from fedhb.seeding import Randomness
from fedhb.settings_fields import FILTERS

FILTERED = sorted(
    name for name, algorithm in CASES.items() if not algorithm.pools and algorithm.sends
)


IDLE = Defence(("refuse", "clip"), longest=1e9, most=1e9)


def one_round(algorithm: Any, executor: Any, lengths: tuple[float, ...] = ()) -> tuple[Any, Any]:
    prob, rng = problem(), Randomness(5, 1)
    server = algorithm.start(prob, Randomness(5))
    try:
        found, _ = executor.run(server, range(6), plan(algorithm), rng)
    finally:
        executor.close()
    extra: Any = {}
    if isinstance(algorithm, Defended):
        found, _, extra = algorithm.sift(prob, server, found, rng, lengths)
    return algorithm.aggregate(prob, server, found, rng), extra


def here(algorithm: Any, chunk: int = 2) -> Any:
    return one_round(algorithm, InProcess(problem(), algorithm, clients(), ClientStore(), chunk))


@pytest.mark.parametrize("name", FILTERED)
def test_filters_that_find_nothing_change_nothing(name):
    algorithm = CASES[name]
    plain, _ = here(algorithm)
    filtered, extra = here(Defended(algorithm, IDLE))
    assert_close(filtered, plain, 1e-9, name)
    assert extra["refused"] == extra["clipped"] == 0 and extra["answer_norm"] > 0


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("filters", [DEFAULT, ("krum",), FILTERS])
def test_who_trains_whom_does_not_matter(name, filters):
    """Chunks of any length, one process or two: the same numbers."""
    algorithm = Defended(CASES[name], Defence(filters))
    one, _ = here(algorithm, 1)
    # Mixture's clients ask all prototypes in one matrix product, which rounds by the chunk's length
    assert_close(here(algorithm, 3)[0], one, 1e-9 if name.startswith("mixture") else 0.0)
    if filters == DEFAULT:
        two = one_round(algorithm, Workers(problem(), algorithm, clients(), ClientStore(), 2, 1))[0]
        assert same_bits(one, two)


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30, 100.0])
def test_one_absurd_answer_is_refused(name, factor):
    """The round is that of the five others."""
    algorithm = CASES[name]
    spoiled, extra = here(
        Defended(
            Hostile(algorithm, (2,), factor),
            IDLE if not math.isfinite(factor) else Defence(("refuse",)),
        )
    )
    assert extra["refused"] == 1
    others = Defended(algorithm, IDLE)
    prob, rng = problem(), Randomness(5, 1)
    server = algorithm.start(prob, Randomness(5))
    found, _ = InProcess(prob, others, clients(), ClientStore(), 2).run(
        server, [0, 1, 3, 4, 5], plan(algorithm), rng
    )
    summary, _, _ = others.sift(prob, server, found, rng, ())
    assert_close(
        spoiled,
        algorithm.aggregate(prob, server, summary, rng),
        1e-9 if name.startswith("mixture") else 0.0,
    )


def test_a_spoiled_memory_is_not_kept():
    """A client whose training breaks down begins the next round where it began this one."""
    algorithm = Defended(CASES["empirical-bayes-last"], IDLE)
    who, store, prob = clients(), ClientStore(), problem()
    x = who.train.x.clone()
    x[who.train.rows_of(2)] = math.nan
    executor = InProcess(prob, algorithm, replace(who, train=replace(who.train, x=x)), store, 2)
    executor.run(algorithm.start(prob, Randomness(5)), range(6), plan(algorithm), Randomness(5, 1))
    store.commit()
    assert all(
        torch.isfinite(value).all()
        for memory in store.memories.values()
        for value in memory.values()
    )
    assert float(store.memories[2]["seen"]) == 0.0 and float(store.memories[1]["seen"]) == 1.0


def test_when_most_answers_are_bad_the_run_stops():
    assert here(Defended(Hostile(fedhb.FedAvg(), (0, 1, 2), math.nan), IDLE))[1]["refused"] == 3
    for ids, says in (
        ((0, 1, 2, 3, 4), "5 of 6 .*NaN"),
        ((0, 1, 2, 3, 4, 5), "6 of 6"),
    ):
        with pytest.raises(DivergedError, match=says):
            here(Defended(Hostile(fedhb.FedAvg(), ids, math.nan), IDLE))
    far = Defended(Hostile(fedhb.FedAvg(), (0, 1, 2, 3, 4, 5), 100.0), Defence(("refuse",)))
    # all at once, against the past
    with pytest.raises(DivergedError, match=r"6 of 6 answers"):
        one_round(far, InProcess(problem(), far, clients(), ClientStore(), 2), (0.1,) * 9)


@pytest.mark.parametrize("lie", [1e12, -1e12])
def test_a_client_that_lies_about_its_training_moves_little(lie):
    """The prior and its weight decay are learned from few numbers that clients report beside
    their vectors.
    """
    algorithm = Defended(fedhb.EmpiricalBayes(lambda0=1.0), Defence())
    prob, rng = problem(), Randomness(5, 1)
    server = algorithm.start(prob, Randomness(5))
    found, _ = InProcess(prob, algorithm, clients(), ClientStore(), 2).run(
        server, range(6), plan(algorithm), rng
    )

    def after(row: int | None) -> Any:
        told = {key: value.clone() for key, value in found.items()}
        if row is not None:
            for key in MEASURED.keys() - {"measured"}:
                told[key][row] = lie
        return algorithm.aggregate(
            prob, server, algorithm.sift(prob, server, told, rng, ())[0], rng
        )

    honest, lied = after(None), after(2)
    assert (lied["m0"] - honest["m0"]).norm() < 0.2 * (honest["m0"] - server["m0"]).norm()
    assert (lied["V0"] / honest["V0"]).min() > 0.3 and (lied["V0"] / honest["V0"]).max() < 3.0


@pytest.mark.parametrize("lie", [[3e38, 3e38], [-5.0, 6.0], [0.0, 0.0], [-1e9, -1e9]])
def test_shares_that_a_client_makes_up_are_shares_all_the_same(lie):
    """FedEM predicts for new clients by the mean of what clients say of their learners: one of six
    is a sixth of it.
    """
    algorithm = Defended(fedhb.FedEM(num_learners=2, weighted=False), Defence())
    prob, rng = problem(), Randomness(5, 1)
    server = algorithm.start(prob, Randomness(5))
    found, _ = InProcess(prob, algorithm, clients(), ClientStore(), 2).run(
        server, range(6), plan(algorithm), rng
    )
    honest = found["pi"].clone()
    found["pi"][2] = torch.tensor(lie)
    pi = algorithm.aggregate(prob, server, algorithm.sift(prob, server, found, rng, ())[0], rng)[
        "pi"
    ]
    assert pi.sum().item() == pytest.approx(1.0, abs=1e-6) and (pi >= 0).all()
    assert (pi - honest.mean(0)).abs().max() <= 1 / 6 + 1e-6


def test_numbers_are_held_at_the_median_of_those_who_measured():
    numbers = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 7.0], [-4.0, 1e9], [1e9, 6.0]])
    expected = [
        [1.0, 0.0],
        [2.0, 0.0],
        [3.0, 7.0],
        [0.0, 35.0],
        [10.0, 6.0],
    ]  # the medians are 2 (the lower one) and 7
    assert held(numbers, 5.0).tolist() == expected
    assert held(torch.zeros(3, 1), 5.0).tolist() == [[0.0]] * 3


def test_the_bound_is_one_that_few_cannot_move():
    """The past counts: in a round where half of the answers are ten times too long, they are seen
    to be.
    """
    algorithm = Defended(Hostile(fedhb.FedAvg(), (0, 1), 100.0), Defence(("refuse",)))
    _, extra = one_round(
        algorithm, InProcess(problem(), algorithm, clients(), ClientStore(), 2), (0.5,) * 9
    )
    assert extra["refused"] == 2


def federation(count: int = 20) -> Clients:
    return Clients.from_arrays(arrays([30] * count), arrays([10] * count, seed=1), num_classes=3)


@pytest.mark.parametrize(("attack", "share"), list(itertools.product(ATTACKS, [0.1, 0.2])))
@pytest.mark.parametrize("name", ["empirical-bayes", "fedavg", "mixture"])
def test_the_default_defence_learns_what_the_clean_run_learns(name, attack, share):
    options: dict[str, Any] = {
        "rounds": 15,
        "fraction": 0.5,
        "batch_size": 10,
        "lr": 0.1,
        "progress": False,
        "seed": 1,
    }
    algorithm, who = fedhb.algorithms.build(name, {}), federation()
    clean = fedhb.fit(mlp(torch.float32), who, algorithm, **options).result["global"]["accuracy"]
    hostile, spoiled = attacked(algorithm, who, attack, share, seed=3)
    run = fedhb.fit(mlp(torch.float32), spoiled, hostile, defence="default", **options)
    assert run.result["global"]["accuracy"] > clean - 0.06  # of 200 test examples
    if attack in ("nan", "scale"):
        assert sum(record["refused"] for record in run.records) > 0


def test_without_a_defence_the_attacks_do_harm():
    """They are no straw men."""
    options: dict[str, Any] = {
        "rounds": 15,
        "fraction": 0.5,
        "batch_size": 10,
        "lr": 0.1,
        "progress": False,
        "seed": 1,
    }
    who = federation()
    clean = fedhb.fit(mlp(torch.float32), who, fedhb.FedAvg(), **options).result["global"][
        "accuracy"
    ]
    hostile, spoiled = attacked(fedhb.FedAvg(), who, "nan", 0.2, seed=3)
    with pytest.raises(DivergedError, match=r"'theta'.*NaN"):
        fedhb.fit(mlp(torch.float32), spoiled, hostile, **options)
    blown_up = Hostile(fedhb.FedAvg(), tuple(choose(20, 0.2, 3)), -100.0)
    found = fedhb.fit(mlp(torch.float32), who, blown_up, **options).result["global"]["accuracy"]
    assert found < clean - 0.2
    found = fedhb.fit(mlp(torch.float32), who, blown_up, defence="default", **options).result[
        "global"
    ]["accuracy"]
    assert found > clean - 0.06


def test_a_defended_run_is_resumed_to_the_same_bits(tmp_path):
    options: dict[str, Any] = {
        "rounds": 8,
        "fraction": 0.5,
        "batch_size": 4,
        "progress": False,
        "evaluate_on": None,
    }
    options |= {"defence": "default", "resume": True, "checkpoint_every": 3}
    hostile, who = attacked(fedhb.EmpiricalBayes(begin="last"), clients(), "scale", 0.2, seed=0)
    whole = fedhb.fit(mlp(torch.float32), who, hostile, out=tmp_path / "whole", **options)

    class Stop:
        def on_start(self, done: int, rounds: int) -> None:
            pass

        def on_round(self, record: Any, state: Any) -> None:
            if state.done == 5:
                raise KeyboardInterrupt

        def on_end(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        fedhb.fit(
            mlp(torch.float32), who, hostile, out=tmp_path / "run", callbacks=[Stop()], **options
        )
    run = fedhb.fit(mlp(torch.float32), who, hostile, out=tmp_path / "run", **options)
    assert (
        same_bits(run.state.server, whole.state.server) and run.state.lengths == whole.state.lengths
    )
    with pytest.raises(InputError, match="resume"):
        fedhb.fit(
            mlp(torch.float32),
            who,
            hostile,
            out=tmp_path / "run",
            **(options | {"defence": "clip"}),
        )
