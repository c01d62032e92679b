"""The cost of a step, counted in operations, passes over the weights and allocations: a count does
not depend on the machine.

`fedhb bench` measures seconds. These tests keep what made them few.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from builders import seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedhb.algorithms import Federation, Plan, Problem, build
from fedhb.clients.clients import Clients
from fedhb.engine.schedule import cohort
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network
from fedhb.seeding import Randomness

CLIENTS, BATCH, FEATURES, HIDDEN, CLASSES = 3, 5, 40, 400, 4
D = HIDDEN * (FEATURES + 1)
VIEWS = {
    "view",
    "slice",
    "select",
    "expand",
    "detach",
    "alias",
    "transpose",
    "t",
    "unsqueeze",
    "squeeze",
    "unbind",
    "as_strided",
}
VIEWS |= {"_unsafe_view", "permute", "split", "split_with_sizes", "lift_fresh", "diagonal"}


class Count(TorchDispatchMode):
    """Operations by name, and the numbers written by those that write as many as a client has
    weights; how many to new memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.written = self.allocated = 0
        self.kinds: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        before = {a.untyped_storage().data_ptr() for a in given}
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in VIEWS:
            return out
        self.calls[name] += 1
        if given:
            self.kinds[name, given[0].dtype] += 1
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and value.numel() >= D // 2:
                self.written += value.numel()
                if value.untyped_storage().data_ptr() not in before:
                    self.allocated += value.numel()
        return out


def a_step(
    name: str, momentum: float, **options: Any
) -> tuple[Counter[str], float, float, Counter[Any]]:
    """Return the cost of one more step: operations by name, and passes over the clients' weights,
    written and newly allocated.
    """
    counts = []
    for steps in (2, 4):
        rng = np.random.default_rng(0)
        pairs = [
            (
                rng.integers(0, 256, (BATCH * steps, FEATURES), dtype=np.uint8),
                rng.integers(0, CLASSES, BATCH * steps),
            )
        ] * CLIENTS
        clients = Clients.from_arrays(pairs, num_classes=CLASSES, standardise=True)
        with seeded():
            module = nn.Sequential(
                nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
            )
        network = Network(module, scaling=clients.scaling)
        problem = Problem(
            network, Categorical(CLASSES), Federation(CLIENTS, clients.num_examples, CLASSES)
        )
        algorithm = build(name, options)
        received = algorithm.broadcast(
            algorithm.start(problem, Randomness(0)), clients.ids.tolist()
        )
        plan = Plan(1, BATCH, 0.1, momentum, algorithm.update == "full")
        with Count() as count:
            algorithm.local_update(
                problem,
                received,
                clients,
                algorithm.remember(problem, clients),
                plan,
                Randomness(0, 1),
            )
        counts.append(count)
    one, other = counts

    def per_step(less: int, more: int) -> float:
        return (more - less) / 2 / (CLIENTS * D)

    calls = Counter(
        {
            key: (other.calls[key] - one.calls[key]) // 2
            for key in other.calls
            if other.calls[key] != one.calls[key]
        }
    )
    kinds = Counter({key: (other.kinds[key] - one.kinds[key]) // 2 for key in other.kinds})
    return (
        calls,
        per_step(one.written, other.written),
        per_step(one.allocated, other.allocated),
        kinds,
    )


@pytest.mark.parametrize(
    ("name", "momentum", "passes"),
    [
        ("fedbabu", 0.0, 1),  # the product of the backward pass takes the step itself
        ("fedbabu", 0.9, 2),  # it goes into the velocity, which then moves the weights
        ("niw", 0.0, 2),  # and the pull
        ("niw", 0.9, 4),
        ("fedprox", 0.0, 2),
        ("mixture", 0.0, 3),  # two networks, and the pull in one product
        ("mixture", 0.9, 6),
    ],
)
def test_passes_over_the_weights(name, momentum, passes):
    options = {"p_do": 1.0} if name == "niw" else {"update": "body"} if name == "fedprox" else {}
    _, written, allocated, _ = a_step(name, momentum, **options)
    assert written == pytest.approx(passes, abs=0.1)
    # a block of what pulls the weights, and of the mean of the prototypes, is new memory that stays
    # in the cache
    assert allocated == pytest.approx(
        {("niw", 0.9): 1, ("mixture", 0.9): 1}.get((name, momentum), 0), abs=0.1
    )


@pytest.mark.parametrize(
    ("name", "most"), [("fedavg", 21), ("fedbabu", 18), ("niw", 28), ("mixture", 40)]
)
def test_operations_of_a_step(name, most):
    calls, *_ = a_step(name, 0.0)
    assert calls.total() <= most, calls


def test_batches_are_fetched_row_by_row_and_scaled_once():
    calls, _, _, kinds = a_step("mixture", 0.0)
    assert kinds["index_select", torch.uint8] == 1 and kinds["index", torch.uint8] == 0
    assert kinds["_to_copy", torch.uint8] == 1  # for the model and its gate
    assert calls["mv"] == 1  # how near m is to the prototypes: for the pull and for the gate


def test_no_autograd_for_linear_layers():
    calls, *_ = a_step("fedavg", 0.0)
    assert not [name for name in calls if "backward" in name and name != "threshold_backward"]


def test_a_cohort_costs_what_it_holds():
    """Of a million clients a hundred are drawn, and nothing of a million's size is made."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            self.size = max(self.size, out.numel()) if isinstance(out, torch.Tensor) else self.size
            return out

    with Largest() as mode:
        assert len(cohort(1_000_000, 1e-4, Randomness(0, 1))) == 100
    assert 0 < mode.size <= 1000


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import fedhb.cli.main", ("torch", "numpy", "sklearn")),
        ("from fedhb import data; data.load('digits')", ("sklearn", "scipy")),
        ("import fedhb; fedhb.fit", ("sklearn", "scipy", "torch._dynamo")),
    ],
)
def test_nothing_is_imported_that_is_not_needed(code, absent):
    check = f"{code}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
