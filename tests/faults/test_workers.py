"""Worker processes that die, hang or run out of memory: the same numbers, a line in the log, and
nothing left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import clients, mlp, plan, problem, same_bits
from fault_share import cases

import fedhb
from fedhb.engine import workers
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.engine.workers import Workers
from fedhb.errors import WorkersError
from fedhb.seeding import Randomness

pytestmark = pytest.mark.faults

HERE = os.getpid()


def spin() -> None:
    while True:
        pass


def exhaust() -> None:
    """Ask torch for more than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    torch.ones(2**34, dtype=torch.uint8)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


FAULTS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": interrupt,
    "crashed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": lambda: time.sleep(1000),
    "without end": spin,
    "out of memory in torch": exhaust,
    "out of memory": lambda: bytearray(2**50),
}
SAYS = {"stopped": "does not go on", "asleep": "does not go on", "without end": "does not go on"}
SAYS |= {"out of memory": "out of memory", "out of memory in torch": "out of memory"}


@dataclass(frozen=True)
class Faulty(fedhb.NIW):
    """NIW whose update of some client, in a worker process, goes wrong as often as the folder has
    files.
    """

    begin: str = "last"
    fault: str = ""
    folder: str = ""
    victim: int = 2
    round: int = 2

    def local_update(
        self, problem: Any, received: Any, clients: Any, memory: Any, plan: Any, rng: Any
    ) -> Any:
        due = (
            rng.round == self.round and self.victim in clients.ids.tolist() and os.getpid() != HERE
        )
        for token in sorted(Path(self.folder).iterdir()) if due else ():
            with contextlib.suppress(FileNotFoundError):  # another process took it
                token.unlink()
                FAULTS[self.fault]()
        return super().local_update(problem, received, clients, memory, plan, rng)


def three_rounds(algorithm: Any, executor: Any, store: ClientStore) -> Any:
    prob = problem()
    server = algorithm.start(prob, Randomness(5))
    try:
        for round_number in (1, 2, 3):
            rng = Randomness(5, round_number)
            summary, traffic = executor.run(server, range(6), plan(algorithm), rng)
            server = algorithm.aggregate(prob, server, summary, rng)
            store.commit()
    finally:
        executor.close()
    return server, store.memories, traffic


@pytest.fixture
def impatient(monkeypatch, processes):
    monkeypatch.setattr(workers, "PATIENCE", 0.6)
    monkeypatch.setattr(workers, "LOOK", 0.1)


@pytest.fixture
def processes() -> Any:
    """End the processes that a test has forked."""
    before = children()
    yield
    assert not children() - before


def children(of: int | None = None) -> set[int]:
    """The processes that this one, or another, has forked."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            content = path.read_text()
            parent = int(content.rpartition(")")[2].split()[1])
            if parent == (of or os.getpid()):
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_round_is_finished_by_the_others(fault, times, impatient, tmp_path, caplog):
    """The victim's chunk is trained by another worker, twice if need be: then all have died, and
    new ones come.
    """
    for case in range(cases(20)):
        tokens = tmp_path / str(case)
        tokens.mkdir()
        algorithm = Faulty(fault=fault, folder=str(tokens), victim=case % 6, round=1 + case % 3)
        who, prob, store = clients(), problem(), ClientStore()
        right = three_rounds(algorithm, InProcess(prob, algorithm, who, store, 1), store)
        for k in range(times):
            (tokens / str(k)).touch()
        store = ClientStore()
        executor = Workers(prob, algorithm, who, store, 2, 1)
        found = three_rounds(algorithm, executor, store)
        assert not list(tokens.iterdir())  # it did happen
        assert same_bits(found[0], right[0]) and found[2] == right[2]
        assert found[1].keys() == right[1].keys() and all(
            same_bits(found[1][i], right[1][i]) for i in right[1]
        )
        assert "worker process" in caplog.text and SAYS.get(fault, "died") in caplog.text
        caplog.clear()


def test_the_dead_are_replaced_in_the_next_round(impatient, tmp_path):
    (tmp_path / "once").touch()
    algorithm, who, prob, store = (
        Faulty(fault="killed", folder=str(tmp_path), round=1),
        clients(),
        problem(),
        ClientStore(),
    )
    executor = Workers(prob, algorithm, who, store, 2, 1)
    try:
        server = algorithm.start(prob, Randomness(5))
        executor.run(server, range(6), plan(algorithm), Randomness(5, 1))
        assert len(executor._workers) == 1
        executor.run(server, range(6), plan(algorithm), Randomness(5, 2))
        assert len(executor._workers) == 2
    finally:
        executor.close()


def test_when_all_die_again_and_again_the_user_is_told(impatient, tmp_path):
    for k in range(20):
        (tmp_path / str(k)).touch()
    algorithm, store = Faulty(fault="killed", folder=str(tmp_path)), ClientStore()
    with pytest.raises(
        WorkersError,
        match=r"exit code -9.*fewer workers",
    ):
        three_rounds(algorithm, Workers(problem(), algorithm, clients(), store, 2, 1), store)


def test_slow_work_is_not_taken_for_a_hang(impatient, monkeypatch):
    """It uses the processor: the worker is left alone."""

    class Slow(fedhb.FedAvg):
        def local_update(self, *args: Any) -> Any:
            end = time.process_time() + 1.5
            while time.process_time() < end:
                pass
            return super().local_update(*args)

    algorithm, prob, store = Slow(), problem(), ClientStore()
    executor = Workers(prob, algorithm, clients(), store, 2, 3)
    monkeypatch.setattr(workers.log, "warning", pytest.fail)
    try:
        executor.run(
            algorithm.start(prob, Randomness(5)), range(6), plan(algorithm), Randomness(5, 1)
        )
    finally:
        executor.close()


# ---- however it ends, nothing is left

SCRIPT = """
import pathlib, sys, time
sys.path.insert(0, {helpers!r})
import typer
import fedhb
from fedhb.cli import main as cli
from stopped_runs import fit

class Slow(fedhb.FedAvg):
    def local_update(self, *args):
        if {fails!r} and args[-1].round == 3:
            raise ValueError("a mistake")
        time.sleep(0.02)
        return super().local_update(*args)

options = dict(workers=2, fraction=1.0, rounds={rounds}, algorithm=Slow(), checkpoint_every=1)
cli.app = typer.Typer(pretty_exceptions_enable=False)
cli.app.command()(lambda: fit(pathlib.Path({out!r}), **options))
sys.argv = ["fedhb"]
cli.main()
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def shared_memory() -> set[Path]:
    """Segments and semaphores, but for those that name another living process: other work on this
    machine comes and goes.
    """
    named = {
        path: [int(number) for number in re.findall(r"[-_](\d{3,})(?=[-_])", path.name)]
        for path in Path("/dev/shm").iterdir()
    }
    return {path for path, numbers in named.items() if not any(alive(number) for number in numbers)}


ENDS: dict[str, tuple[int | None, int]] = {
    "normally": (None, 0),
    "by an error": (None, 1),
    "by Ctrl-C": (signal.SIGINT, 130),
    "by SIGTERM": (signal.SIGTERM, 143),
    "by SIGKILL": (signal.SIGKILL, -signal.SIGKILL),
    "by SIGHUP": (signal.SIGHUP, -signal.SIGHUP),
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left(how, tmp_path):
    """No process and no shared memory, after whatever end; and the run can be resumed at once."""
    number, code = ENDS[how]
    for case in range(cases(20)):
        out, shared = tmp_path / str(case), shared_memory()
        rounds = 5 if number is None else 10_000
        script = SCRIPT.format(
            rounds=rounds,
            helpers=str(Path(builders.__file__).parent),
            fails=how == "by an error",
            out=str(out),
        )
        # a group of its own: Ctrl-C in a terminal reaches the workers too
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        forked: set[int] = set()
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            forked |= children(process.pid)
            if (
                number is not None
                and len(forked) >= 2
                and list(out.glob("checkpoint/round-*.json"))
            ):
                time.sleep(0.03 * case)
                os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(
                    process.pid, number
                )
                break
            time.sleep(0.005)
        _, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert len(forked) >= 2
        deadline = time.monotonic() + 1
        while any(map(alive, forked)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(alive, forked))
        assert shared_memory() <= shared
        if number is not None:
            done = fedhb.load(out, model=mlp(torch.float32), algorithm=fedhb.FedAvg()).state.done
            assert done >= 1
            with fedhb.runs.folder.RunFolder(out).locked():  # no orphan holds the lock
                pass
