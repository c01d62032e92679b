"""Many clients, many rounds: memory, open files and the time of a round stay where they were.

Each case runs in a process of its own, so that its memory is its own; the full numbers are ten
thousand clients in one round, a million clients in the population, and ten thousand rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

import pytest
from fault_share import cases

pytestmark = pytest.mark.faults

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import torch
import fedhb

given = json.loads(sys.argv[1])
torch.manual_seed(0)
rng = np.random.default_rng(0)
N, n = given["clients"], given["examples"]
x = rng.normal(size=(N * n, 8)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
data = fedhb.data.dataset.Examples(x, y, np.repeat(np.arange(N), n))
who = fedhb.partition.natural(fedhb.data.dataset.Dataset("made", data, data, 2, {"made": "up"}))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def resident():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS")) / 1024

seen = []
class Watch:
    def on_start(self, done, rounds): pass
    def on_round(self, record, state):
        seen.append((resident(), len(os.listdir("/proc/self/fd")), record["seconds"], time.perf_counter()))
    def on_end(self): pass

algorithm = fedhb.algorithms.build(given["algorithm"], given.get("settings", {}))
options = dict(rounds=given["rounds"], fraction=given["fraction"], batch_size=10, evaluate_on=None, progress=False)
fedhb.fit(model, who, algorithm, callbacks=[Watch()], out=given.get("out"), checkpoint_every=given.get("every", 10),
          workers=given.get("workers", 1), schedule="constant", **options)
print(json.dumps(seen))
"""


def measured(**given: Any) -> list[list[float]]:
    """Per round: resident MiB, open files, seconds of the round, and the clock."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def thirds(rounds: list[list[float]], column: int) -> tuple[float, float]:
    """The median of the second tenth and of the last tenth of the rounds: what was at first, and
    what has come of it.
    """
    tenth = max(1, len(rounds) // 10)
    values = [row[column] for row in rounds]
    return statistics.median(values[tenth : 2 * tenth]), statistics.median(values[-tenth:])


def show(what: str, rounds: list[list[float]], record: Any) -> None:
    """Said in the test's report: what docs/reliability.md quotes."""
    memory, files, seconds = (thirds(rounds, column) for column in range(3))
    record("figures", f"{what}: {memory[0]:.0f} -> {memory[1]:.0f} MiB, {files[0]:.0f} -> {files[1]:.0f} files, "
           f"{1e3 * seconds[0]:.2f} -> {1e3 * seconds[1]:.2f} ms a round")  # fmt: skip


def flat(rounds: list[list[float]], megabytes: float) -> None:
    (memory_before, memory), (files_before, files), (before, after) = (
        thirds(rounds, column) for column in range(3)
    )
    assert memory < memory_before + megabytes, (memory_before, memory)
    assert files <= files_before + 1, (files_before, files)
    assert after < 3 * before + 0.01, (before, after)  # other work may slow any part of the run


@pytest.mark.parametrize("algorithm", ["niw", "fedavg", "mixture"])
def test_many_rounds(algorithm, tmp_path, record_property):
    rounds = measured(
        clients=20,
        examples=10,
        rounds=cases(10_000, least=100),
        fraction=0.2,
        algorithm=algorithm,
        out=str(tmp_path / "run"),
    )
    show(f"{algorithm}, {len(rounds)} rounds", rounds, record_property)
    flat(rounds, megabytes=12.0)


def test_many_rounds_with_workers(record_property):
    last = {"begin": "last"}
    rounds = measured(
        clients=20,
        examples=10,
        rounds=cases(10_000, least=60),
        fraction=0.5,
        algorithm="niw",
        workers=2,
        settings=last,
    )
    show(f"two workers, {len(rounds)} rounds", rounds, record_property)
    flat(rounds, megabytes=12.0)


def test_many_clients_in_a_round(record_property):
    """Ten thousand answers are summed in the memory that a thousand need."""
    many = cases(10_000, least=2000)
    few, all_ = (
        measured(
            clients=many,
            examples=5,
            rounds=3,
            fraction=share,
            algorithm="niw",
            settings={"update": "full"},
        )
        for share in (0.1, 1.0)
    )
    show(f"{many} clients in a round", all_, record_property)
    assert all_[-1][0] < few[-1][0] + 24.0, (few[-1][0], all_[-1][0])


def test_a_million_clients(tmp_path, record_property):
    """A round's time and memory depend on its cohort, not on the population; who never took part
    takes no room.
    """
    many, count, last = cases(1_000_000, least=20_000), cases(100, least=20), {"begin": "last"}
    given = {"rounds": 30, "algorithm": "niw", "settings": last, "examples": 2}
    rounds = measured(
        clients=many, fraction=count / many, out=str(tmp_path / "run"), every=30, **given
    )
    show(f"{many} clients, {count} in a round", rounds, record_property)
    small = measured(clients=20 * count, fraction=0.05, **given)
    flat(rounds, megabytes=30.0)  # the memories of up to 3,000 clients
    seconds = [statistics.median(row[2] for row in some[5:]) for some in (rounds, small)]
    assert seconds[0] < 4 * seconds[1] + 0.02, seconds
