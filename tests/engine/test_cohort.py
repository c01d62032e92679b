"""A cohort in chunks: their size, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import CASES, CLASSES, FEATURES, clients, mlp, plan, problem
from torch.utils._python_dispatch import TorchDispatchMode

import fedhb
from engines import RNG, fit
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Traffic, chunk_size, deal
from fedhb.engine.in_process import InProcess
from fedhb.seeding import Randomness


def test_the_summary_does_not_grow_with_the_cohort():
    """One client at a time, no tensor is larger for twelve clients than for four: no [N_f, d] is
    ever built.
    """

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
        # sums of differences and of squares, or of differences alone
        vectors = {"empirical-bayes-body": 2, "niw-body": 2, "fedavg-body": 1}
        if name in vectors:
            assert summed[4] // prob.network.num_params == vectors[name]


def sizes(network: Any) -> tuple[int, int]:
    return network.num_params, len(network.head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_those_of_the_vectors_sent(dtype):
    who, prob = clients(), problem(mlp(dtype))
    d, h = sizes(prob.network)
    expected = {
        "empirical-bayes-body": (
            d + 4,
            d + 13,
        ),  # two variances a tensor; of curvature, time and the way of few steps 3 + 5 L numbers
        "empirical-bayes-full": (d + h + 8, d + h + 23),
        "empirical-bayes-last": (d + h + 8, d + h + 23),
        "niw-body": (2 * d, d),
        "niw-full": (2 * d + h, d + h),
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
