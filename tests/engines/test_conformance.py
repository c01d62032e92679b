"""What every algorithm owes the engines, for every algorithm of the registry."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    CASES,
    CLASSES,
    FEATURES,
    NETWORKS,
    PLAN,
    assert_close,
    clients,
    mlp,
    plan,
    problem,
    same_bits,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fedhb
from fedhb.algorithms import ALGORITHMS, Hierarchical
from fedhb.algorithms.toolbox import add
from fedhb.engine.automatic import Automatic
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Traffic, chunk_size, deal
from fedhb.engine.in_process import InProcess
from fedhb.engine.loop import Training
from fedhb.engine.schedule import cohort
from fedhb.engine.workers import Workers
from fedhb.seeding import Randomness

RNG = Randomness(1, 1)
PERSONAL = replace(PLAN, train_head=True)
every_algorithm = pytest.mark.parametrize("name", CASES)
WORKERS = ["fedem-full", "ensemble-preset", "local-body"]
every_network = pytest.mark.parametrize(
    "network", ["mlp", "general"]
)  # one that knows the client axis, one that does not


def test_the_cases_hold_every_algorithm_and_every_update():
    for name, cls in ALGORITHMS.items():
        mine = [a for a in CASES.values() if a.name == name]
        assert {a.update for a in mine} == {"body", "full"}
        assert not issubclass(cls, Hierarchical) or {a.begin for a in mine} == {"global", "last"}


def trained(
    algorithm: Any, prob: Any, who: Any, executor: Any, store: ClientStore, rounds: int = 2
) -> tuple[Any, Traffic]:
    """The server's state after some rounds with all clients and then with half of them."""
    server, traffic = algorithm.start(prob, Randomness(1)), Traffic()
    for number in range(1, rounds + 1):
        rng = Randomness(1, number)
        positions = range(len(who)) if number % 2 else range(0, len(who), 2)
        summary, traffic = executor.run(server, positions, plan(algorithm), rng)
        server = algorithm.aggregate(prob, server, summary, rng)
        store.commit()
    return server, traffic


def snapshot(*values: Any) -> list[dict[str, torch.Tensor]]:
    return [{key: value.clone() for key, value in arrays.items()} for arrays in values]


def pools(who: Any) -> dict[str, torch.Tensor]:
    shares = {"train": who.train, "test": who.test}
    found = {
        f"{s}.{k}": getattr(share, k)
        for s, share in shares.items()
        for k in ("x", "y", "rows", "offsets")
    }
    return found | {"ids": who.ids, "mean": who.scaling.mean, "std": who.scaling.std}


def vectors(prob: Any) -> dict[str, torch.Tensor]:
    network = prob.network
    return {
        "theta": network.theta,
        "head": network.head,
        "buffers": network.buffers,
        **dict(network.module.state_dict()),
    }


def rows(
    arrays: dict[str, torch.Tensor], positions: Any, keys: Any = None
) -> dict[str, torch.Tensor]:
    """The arrays of the clients at these positions; with `keys`, only those have a client axis."""
    return {
        key: value[list(positions)] if keys is None or key in keys else value
        for key, value in arrays.items()
    }


# ---- one client at a time, or many at once


@every_network
@every_algorithm
def test_any_number_of_clients_at_once_gives_the_same(name, network):
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    results = {}
    for chunk in (1, 4, len(who)):
        store = ClientStore()
        server, traffic = trained(
            algorithm, prob, who, InProcess(prob, algorithm, who, store, chunk), store
        )
        results[chunk] = (server, store.memories, traffic)
    server, memories, traffic = results[1]
    for chunk in (4, len(who)):
        assert_close(results[chunk][0], server, what=f"{chunk} at once")
        assert results[chunk][1].keys() == memories.keys() and results[chunk][2] == traffic
        for client in memories:
            assert_close(
                results[chunk][1][client], memories[client], what=f"memory of client {client}"
            )
    assert not torch.equal(
        next(iter(server.values())), next(iter(algorithm.start(prob, Randomness(1)).values()))
    )


@every_network
@every_algorithm
def test_clients_in_any_order_find_and_become_the_same(name, network):
    """Directly, without the engine's order by size: what is found, and the personal posteriors."""
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    server = algorithm.start(prob, Randomness(1))
    order = [4, 2, 0, 5, 1, 3]
    store, some = ClientStore(), who.select(order)
    received = algorithm.broadcast(server, some.ids.tolist())
    memory = store.load(algorithm, prob, some)
    found, remembered = algorithm.local_update(prob, received, some, memory, plan(algorithm), RNG)
    personal = algorithm.personalise(prob, server, some, memory, PERSONAL, RNG)
    x = torch.stack([who.test.examples(k)[0] for k in order])
    predictions = personal.predict(x)
    for c, k in enumerate(order):
        one = who.select([k])
        if not algorithm.pools:
            mine_alone = (
                algorithm.broadcast(server, one.ids.tolist()),
                one,
                store.load(algorithm, prob, one),
            )
            alone, alone_remembered = algorithm.local_update(
                prob, *mine_alone, plan(algorithm), RNG
            )
            assert_close(rows(found, [c]), alone, what=f"client {k}")
            assert_close(rows(remembered, [c]), alone_remembered, what=f"memory of client {k}")
        mine = algorithm.personalise(
            prob, server, one, store.load(algorithm, prob, one), PERSONAL, RNG
        )
        assert_close(personal.client(c).arrays(), mine.arrays(), what=f"personalised client {k}")
        torch.testing.assert_close(
            predictions[c], mine.predict(x[c : c + 1])[0], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", [name for name, a in CASES.items() if not a.pools])
def test_sums_are_additive_in_any_order(name):
    algorithm, who, prob = CASES[name], clients(), problem()
    server = algorithm.start(prob, Randomness(1))
    received = algorithm.broadcast(server, who.ids.tolist())
    memory = ClientStore().load(algorithm, prob, who)
    found, _ = algorithm.local_update(prob, received, who, memory, plan(algorithm), RNG)
    whole = algorithm.summarise(prob, received, found, RNG)
    assert all(value.dtype == torch.float64 for value in whole.values())
    new = algorithm.aggregate(prob, server, whole, RNG)
    for size, order in itertools.product(
        (1, 2, len(who)), ([0, 1, 2, 3, 4, 5], [3, 1, 5, 0, 4, 2])
    ):
        total = None
        for begin in range(0, len(who), size):
            some = order[begin : begin + size]
            part = algorithm.summarise(
                prob, rows(received, some, algorithm.each), rows(found, some), RNG
            )
            total = add(total, part)
        assert_close(total, whole, 1e-12, f"{size} at a time")
        assert_close(algorithm.aggregate(prob, server, total, RNG), new, 1e-12)


# ---- nothing is changed that was given


@every_network
@every_algorithm
def test_no_step_changes_what_it_was_given(name, network):
    algorithm, who, prob = CASES[name], clients(standardise=True), problem(NETWORKS[network]())
    server = algorithm.start(prob, Randomness(1))
    memory = ClientStore().load(algorithm, prob, who)
    torch.manual_seed(0)
    before, randomness = snapshot(server, memory, pools(who), vectors(prob)), torch.get_rng_state()
    received = algorithm.broadcast(server, who.ids.tolist())
    sent = snapshot(received)[0]
    found, remembered = algorithm.local_update(prob, received, who, memory, plan(algorithm), RNG)
    answers = snapshot(found, remembered)
    summary = algorithm.summarise(prob, received, found, RNG)
    sums = snapshot(summary)[0]
    new = algorithm.aggregate(prob, server, summary, RNG)
    after = snapshot(new)[0]
    algorithm.report(prob, new, summary)
    algorithm.predict(prob, new, who.test.x, RNG)
    algorithm.personalise(prob, new, who, remembered, PERSONAL, RNG).predict(
        who.test.x[:4].expand(len(who), 4, FEATURES)
    )
    algorithm.local_update(
        prob, algorithm.broadcast(new, who.ids.tolist()), who, remembered, plan(algorithm), RNG
    )
    for what, now, then in (
        ("server", server, before[0]),
        ("memory", memory, before[1]),
        ("clients", pools(who), before[2]),
        ("network", vectors(prob), before[3]),
        ("received", received, sent),
        ("found", found, answers[0]),
        ("remembered", remembered, answers[1]),
        ("summary", summary, sums),
        ("new server", new, after),
    ):
        assert same_bits(now, then), what
    assert torch.equal(torch.get_rng_state(), randomness)
    assert not same_bits(new, server)


@every_network
@every_algorithm
def test_predictions_are_probabilities(name, network):
    algorithm, who, prob = CASES[name], clients(), problem(NETWORKS[network]())
    store = ClientStore()
    server, _ = trained(
        algorithm, prob, who, InProcess(prob, algorithm, who, store), store, rounds=1
    )
    p = algorithm.predict(prob, server, who.test.x, RNG)
    assert torch.equal(algorithm.predict(prob, server, who.test.x, RNG), p)
    memory = store.load(algorithm, prob, who)
    mine = algorithm.personalise(prob, server, who, memory, PERSONAL, RNG).predict(
        who.test.x[:5].expand(len(who), 5, FEATURES)
    )
    assert p.shape == (len(who.test.x), CLASSES) and mine.shape == (len(who), 5, CLASSES)
    for each in (p, mine):
        assert (each >= 0).all()
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1], dtype=torch.float64))
    assert not torch.allclose(mine[0], mine[1])  # personal


# ---- a run that was stopped

ROUNDS = 5


class Stop:
    """Interrupts a run after a round, as Ctrl-C would."""

    def __init__(self, at: int):
        self.at = at

    def on_start(self, done: int, rounds: int) -> None:
        pass

    def on_round(self, record: dict[str, Any], state: Any) -> None:
        record["noted"] = state.done  # what callbacks add is kept
        if state.done == self.at:
            raise KeyboardInterrupt

    def on_end(self) -> None:
        pass


def fit(algorithm: Any, out: Any, stop: int = 0, **options: Any) -> Any:
    chosen = {"rounds": ROUNDS, "fraction": 0.5, "batch_size": 4, "seed": 3, "checkpoint_every": 2}
    chosen |= {"personal_epochs": 1, "progress": False}
    return fedhb.fit(
        mlp(torch.float32),
        clients(),
        algorithm,
        out=out,
        callbacks=[Stop(stop)],
        **(chosen | options),
    )


def records(run: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key != "seconds"} for record in run.records
    ]


def results(run: Any) -> dict[str, Any]:
    return {key: value for key, value in run.result.items() if key not in ("seconds", "executor")}


def memories(run: Any) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{key}": value
        for i, memory in run.state.store.memories.items()
        for key, value in memory.items()
    }


def assert_same_run(one: Any, other: Any) -> None:
    assert same_bits(one.state.server, other.state.server)
    assert (
        dict(sorted(memories(one).items())).keys() == dict(sorted(memories(other).items())).keys()
    )
    assert same_bits(memories(one), memories(other))
    assert records(one) == records(other) and results(one) == results(other)
    assert (
        one.state.traffic == other.state.traffic
        and one.state.client_rounds == other.state.client_rounds
    )


@every_algorithm
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    algorithm = CASES[name]
    whole = fit(algorithm, tmp_path / "whole")
    for stops in ((1,), (2, 3), (3, 4, 5)):
        out = tmp_path / "-".join(map(str, stops))
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                fit(algorithm, out, stop, resume=True)
        resumed = fit(algorithm, out, resume=True)
        assert_same_run(resumed, whole)
        assert_same_run(fedhb.load(out, model=mlp(torch.float32)), whole)
        lines = (out / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, ROUNDS + 1))
        assert [json.loads(line)["noted"] for line in lines] == list(range(1, ROUNDS + 1))


def test_an_interrupted_run_loses_no_round_that_was_done(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(fedhb.NIW(), tmp_path / "run", stop=3)
    run = fedhb.load(tmp_path / "run", model=mlp(torch.float32))
    assert run.state.done == 3 and [r["round"] for r in run.records] == [1, 2, 3]


def test_a_finished_run_is_not_run_again(tmp_path):
    whole = fit(fedhb.NIW(), tmp_path / "run")
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    again = fit(fedhb.NIW(), tmp_path / "run", stop=1, resume=True)
    assert_same_run(again, whole)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()} == files


def test_resuming_nothing_is_starting(tmp_path):
    (tmp_path / "empty").mkdir()
    whole = fit(fedhb.NIW(), None)
    assert same_bits(
        fit(fedhb.NIW(), tmp_path / "absent", resume=True).state.server, whole.state.server
    )
    assert same_bits(
        fit(fedhb.NIW(), tmp_path / "empty", resume=True).state.server, whole.state.server
    )


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.toml").write_text("")
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"rou')
    assert records(fit(fedhb.NIW(), folder, resume=True)) == records(
        fit(fedhb.NIW(), tmp_path / "whole")
    )


# ---- memory


# the ensemble's groups follow from the ids: known before a client takes part, and never stored
REMEMBERING = [
    name for name, a in CASES.items() if a.remember(problem(), clients()) and a.name != "ensemble"
]


@pytest.mark.parametrize("name", REMEMBERING)
def test_only_clients_that_took_part_remember(name):
    run = fit(CASES[name], None, rounds=2, fraction=0.34)  # two of six clients in each round
    seen = {k for number in (1, 2) for k in cohort(6, 0.34, Randomness(3, number))}
    assert run.state.store.memories.keys() == seen and 2 <= len(seen) <= 4
    assert all(
        memory["seen"].item() == 1.0
        for memory in run.state.store.memories.values()
        if "seen" in memory
    )


@pytest.mark.parametrize("name", [name for name in CASES if name not in REMEMBERING])
def test_algorithms_without_memory_store_none(name):
    assert fit(CASES[name], None, rounds=2).state.store.memories == {}


@pytest.mark.parametrize("name", ["niw-last", "mixture-last"])
def test_a_client_begins_where_it_ended(name):
    """Its second update, with a step of size zero, finds what it remembers; a client without memory finds the centre."""
    algorithm, who, prob = CASES[name], clients(), problem()
    server = algorithm.start(prob, Randomness(1))
    received = algorithm.broadcast(server, who.ids.tolist())
    store = ClientStore()
    some = who.select([1, 3])
    found, memory = algorithm.local_update(
        prob, received, some, store.load(algorithm, prob, some), plan(algorithm), RNG
    )
    store.put(some.ids.tolist(), memory)
    assert store.memories == {}  # a round counts when it is done
    store.commit()
    still, _ = algorithm.local_update(
        prob, received, who, store.load(algorithm, prob, who), plan(algorithm, lr=1e-300), RNG
    )
    torch.testing.assert_close(still["m"][[1, 3]], found["m"])
    torch.testing.assert_close(still["m"][[0, 2]], algorithm.centre(received).expand(2, -1))
    assert not torch.allclose(still["m"][1], still["m"][0])


def test_the_summary_does_not_grow_with_the_cohort():
    """One client at a time, no tensor is larger for twelve clients than for four: no [N_f, d] is ever built."""

    class Largest(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.size = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor):
                    self.size = max(self.size, value.untyped_storage().nbytes())
            return out

    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 100), torch.nn.Tanh(), torch.nn.Linear(100, CLASSES)
        ).double()
    for name, algorithm in CASES.items():
        if algorithm.pools:
            continue
        largest, summed = {}, {}
        for count in (4, 12):
            who = clients([3] * count)
            prob, store = problem(wide, who), ClientStore()
            server = algorithm.start(prob, Randomness(1))
            with Largest() as mode:
                once = plan(algorithm, epochs=1)
                summary, _ = InProcess(prob, algorithm, who, store, chunk=1).run(
                    server, range(count), once, RNG
                )
                algorithm.aggregate(prob, server, summary, RNG)
            largest[count], summed[count] = (
                mode.size,
                sum(value.numel() for value in summary.values()),
            )
        assert largest[4] == largest[12] and summed[4] == summed[12], name
        if name in (
            "niw-body",
            "fedavg-body",
        ):  # NIW: sums of differences and of squares; FedAvg: of differences
            assert summed[4] // prob.network.num_params == (2 if name == "niw-body" else 1)


# ---- bytes


def sizes(network: Any) -> tuple[int, int]:
    return network.num_params, len(network.head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_those_of_the_vectors_sent(dtype):
    who, prob = clients(), problem(mlp(dtype))
    d, h = sizes(prob.network)
    expected = {
        "niw-body": (
            d + 4,
            d + 13,
        ),  # two variances a tensor; of curvature, time and the way of few steps 3 + 5 L numbers
        "niw-full": (d + h + 8, d + h + 23),
        "niw-last": (d + h + 8, d + h + 23),
        "niw-printed-body": (2 * d, d),
        "niw-printed-full": (2 * d + h, d + h),
        "mixture-body": (3 * d, 2 * d),
        "mixture-full": (3 * d + h, 2 * d + h),
        "mixture-three": (4 * d + h, 2 * d + h),
        "fedavg-body": (d, d),
        "fedavg-full": (d + h, d + h),
        "fedprox-body": (d, d),
        "fedbabu-body": (d, d),
        "fedem-body": (3 * d, 3 * d + 3),
        "fedem-full": (3 * d + 3 * h, 3 * d + 3 * h + 3),
        "ensemble-body": (d, d),
        "ensemble-preset": (d + h, d + h),
        "centralised-body": (0, 0),
        "local-body": (0, 0),
    }
    for name, (down, up) in expected.items():
        for count in (2, 5):
            server = CASES[name].start(prob, Randomness(1))
            executor = InProcess(prob, CASES[name], who, ClientStore())
            _, traffic = executor.run(server, range(count), plan(CASES[name]), RNG)
            assert (traffic.down, traffic.up) == (
                count * down * dtype.itemsize,
                count * up * dtype.itemsize,
            ), name


def test_one_prototype_needs_no_gate():
    who, prob = clients(), problem()
    algorithm = fedhb.Mixture(num_prototypes=1, update="body")
    server = algorithm.start(prob, Randomness(1))
    _, traffic = InProcess(prob, algorithm, who, ClientStore()).run(
        server, [0], plan(algorithm), RNG
    )
    assert traffic == Traffic(8 * prob.network.num_params, 8 * prob.network.num_params)


def test_the_result_says_what_a_client_sends_in_a_round():
    run = fit(fedhb.NIW(dof="full", update="body"), None, rounds=3, fraction=0.5)
    d = run.problem.network.num_params
    assert run.result["communication"] == {
        "down_bytes": 3 * 3 * 2 * d * 4,
        "up_bytes": 3 * 3 * d * 4,
        "per_client_round": {"down_bytes": 2 * d * 4, "up_bytes": d * 4},
    }
    assert [(r["down_bytes"], r["up_bytes"]) for r in run.records] == [
        (3 * 2 * d * 4, 3 * d * 4)
    ] * 3


# ---- worker processes


@pytest.fixture
def processes() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "name",
    [
        "niw-full",
        "niw-last",
        "mixture-three",
        "fedavg-full",
        "fedprox-body",
        "fedbabu-body",
        *WORKERS,
    ],
)
def test_two_workers_are_one(name, processes):
    algorithm, who, prob = CASES[name], clients(), problem()
    results_ = []
    for count in (1, 2):
        store = ClientStore()
        executor = (
            InProcess(prob, algorithm, who, store)
            if count == 1
            else Workers(prob, algorithm, who, store, count)
        )
        try:
            server, traffic = trained(algorithm, prob, who, executor, store, rounds=3)
        finally:
            executor.close()
        results_.append((server, store.memories, traffic))
    (one, memory, sent), (two, memory_two, sent_two) = results_
    assert_close(two, one, 1e-12)
    assert sent == sent_two and memory.keys() == memory_two.keys()
    for client in memory:
        assert_close(memory_two[client], memory[client], 1e-12)


def test_a_run_with_workers(tmp_path, processes):
    one, two = (fit(fedhb.NIW(begin="last"), tmp_path / str(w), workers=w) for w in (1, 2))
    # float32 weights: the order of the float64 sums may show in their last bit
    assert_close(two.state.server, one.state.server, 1e-6)
    assert two.result["communication"] == one.result["communication"]
    np.testing.assert_allclose(
        two.predict(np.ones((3, FEATURES))), one.predict(np.ones((3, FEATURES))), rtol=1e-5
    )


def test_more_workers_than_clients(processes):
    one, three = (
        fit(fedhb.FedAvg(), None, rounds=1, fraction=0.2, workers=workers) for workers in (1, 3)
    )
    assert_close(three.state.server, one.state.server, 1e-6)


def test_a_workers_error_is_the_runs_error(processes):
    with pytest.raises(fedhb.DivergedError, match="round 1: client"):
        fit(fedhb.FedAvg(), None, workers=2, lr=1e38, local_epochs=3)


def test_memories_cost_no_file_handles(processes):
    """Shared memory would keep a handle open for every array of every client that remembers."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    algorithm, who = CASES["niw-last"], clients([2] * 60)
    prob, store = problem(who=who), ClientStore()
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))
    try:
        executor = Workers(prob, algorithm, who, store, 2)
        try:
            trained(algorithm, prob, who, executor, store, rounds=3)
        finally:
            executor.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(store.memories) == 60


def test_a_worker_that_dies_is_replaced_by_the_others(processes, caplog):
    """Its chunk is trained again: the numbers are those of an undisturbed round."""
    algorithm, who, prob = CASES["niw-last"], clients(), problem()
    results_ = []
    for victim in (False, True):
        store = ClientStore()
        executor = Workers(prob, algorithm, who, store, 2, chunk=1)
        server = algorithm.start(prob, RNG)
        try:
            for round_number in range(3):
                if victim and round_number == 1:
                    os.kill(executor._workers[0].process.pid, signal.SIGKILL)
                summary, _ = executor.run(
                    server, range(len(who)), plan(algorithm), Randomness(5, round_number + 1)
                )
                server = algorithm.aggregate(prob, server, summary, RNG)
                store.commit()
        finally:
            executor.close()
        results_.append((server, store.memories))
    (one, memory), (two, memory_two) = results_
    assert same_bits(one, two) and all(
        same_bits(memory[client], memory_two[client]) for client in memory
    )
    assert "a worker process died (exit code -9" in caplog.text


@pytest.mark.parametrize("name", ["niw-last", "mixture-three", "fedbe-body", "pfedbayes-full"])
def test_who_trains_a_chunk_does_not_matter(name, processes):
    """One process, several, and one that hands over to several: the same bits, because sums are added in the chunks' order."""
    algorithm, who, prob = CASES[name], clients(), problem()
    training = Training(3, 1.0, plan(algorithm), "constant", 5)

    def automatic(store: ClientStore, seconds: float) -> Automatic:
        executor = Automatic(prob, algorithm, who, store, training=training)
        executor.chunk = executor._here.chunk = 2
        executor._workers, executor._decided = Workers(prob, algorithm, who, store, 2, 2), False
        decide = executor._decide
        executor._decide = lambda _, chunks: decide(seconds, chunks)
        return executor

    results_ = []
    for make in (
        lambda store: InProcess(prob, algorithm, who, store, 2),
        lambda store: Workers(prob, algorithm, who, store, 3, 2),
        lambda store: automatic(store, seconds=1.0),
        lambda store: automatic(store, seconds=1e-6),
    ):
        store = ClientStore()
        executor = make(store)
        try:
            server, _ = trained(algorithm, prob, who, executor, store, rounds=3)
            if isinstance(executor, Automatic):
                results_.append(executor.chosen["workers"])
        finally:
            executor.close()
        results_.append((server, store.memories))
    (one, memory), two, several, handed_over, alone, kept = results_
    assert (several, alone) == (2, 1)
    for other, memories_ in (two, handed_over, kept):
        assert same_bits(one, other) and all(
            same_bits(memory[client], memories_[client]) for client in memory
        )


@pytest.mark.parametrize(
    ("batches", "count", "parts", "params", "chunk"),
    [
        (True, 10, 2, 200_960, 5),
        (True, 10, 1, 200_960, 10),
        (True, 100, 2, 200_960, 10),
        (True, 7, 2, 2**21, 1),
        (True, 3, 8, 100, 1),
        (True, 1000, 2, 100, 63),
        (False, 10, 2, 3_206_976, 5),
        (False, 1000, 2, 3_206_976, 8),
        (False, 1000, 2, 10**8, 1),
    ],
)
def test_chunks_fill_a_cache_and_all_cores(batches, count, parts, params, chunk):
    class Shape:
        batches_clients, num_params = batches, params

    assert chunk_size(Shape, count, parts) == chunk
    chunks = deal([1] * count, range(count), chunk)
    assert sorted(k for part in chunks for k in part) == list(range(count))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1 and max(map(len, chunks)) <= chunk


def test_small_work_stays_in_one_process():
    run = fit(fedhb.FedAvg(), None, rounds=1)
    assert run.result["executor"] == {"workers": 1, "clients_at_once": 3}


class Broken(fedhb.FedAvg):
    """An algorithm with a mistake."""

    def local_update(
        self, problem: Any, received: Any, clients: Any, memory: Any, plan: Any, rng: Any
    ) -> Any:
        raise ValueError("client 5's data are malformed")


def test_a_mistake_in_a_worker_is_said_as_it_is(processes):
    with pytest.raises(RuntimeError, match="client 5's data are malformed"):
        fit(Broken(), None, workers=2)


def test_a_worker_has_no_hold_on_the_others(processes):
    """Each ends as soon as its own pipe is closed: none keeps the parent's end of another's open."""
    algorithm, who, prob = CASES["fedavg-full"], clients(), problem()
    executor = Workers(prob, algorithm, who, ClientStore(), 3, chunk=1)
    try:
        executor.run(algorithm.start(prob, RNG), range(len(who)), plan(algorithm), RNG)
        first = executor._workers[0]
        first.pipe.close()
        first.process.join(timeout=1.5)  # before it would look whether its parent is still there
        assert not first.process.is_alive()
    finally:
        executor.close()


def test_a_device_works_in_one_process(monkeypatch):
    prob = problem()
    monkeypatch.setattr(type(prob.network), "device", torch.device("meta"))
    with pytest.raises(fedhb.InputError, match="workers=2 with device=meta"):
        Automatic(
            prob,
            CASES["fedavg-full"],
            clients(),
            ClientStore(),
            training=Training(1, 1.0, PLAN, "constant", 0),
            workers=2,
        )
