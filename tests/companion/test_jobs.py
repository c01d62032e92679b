"""Work in several processes, its progress, and work that is killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from small_experiment import COMMON, Silent, complete, lines, plain, write

from fedhb.errors import InputError
from fedhb.runs import jobs, records
from fedhb.runs.progress import JobProgress
from fedhb_paper import experiments, table, workbench


def test_progress_of_several_stages_on_a_terminal():
    """Rich allows one display at a time; tuning begins one for every stage."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(table.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    for _ in range(2):
        shown.begin(1)
        shown.tell(job, 0.5, "round 1/2")
        shown.recorded({"key": job.key, "seconds": 1.0, "result": {"global": {"accuracy": 0.5}}})
    shown.close()
    shown.close()
    assert console.file.getvalue().count("1/1 one, niw, seed 0: 1.0 s, global 50.00 %") == 2


def test_long_work_says_how_it_goes_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("fedhb.runs.progress.time.monotonic", lambda: next(clock))
    clock = iter([0.0, 1.0, 1.0, 200.0, 200.0, 302.0, 302.0, 302.0, 400.0, 400.0])
    console = Console(file=io.StringIO(), width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(table.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    shown.begin(1)
    for done in (1, 2, 3, 4):
        shown.tell(job, 0.5, f"round {done}/4")
    assert console.file.getvalue() == "one, niw, seed 0: round 3/4\n"


def test_processes_change_nothing(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    complete(tmp_path / "a", cells=["one"], algorithms=["niw", "fedavg"])
    complete(tmp_path / "b", cells=["one"], algorithms=["niw", "fedavg"], processes=2)
    a, b = (
        [plain(r) for r in sorted(lines(tmp_path / x), key=lambda r: records.identity(r["key"]))]
        for x in "ab"
    )
    assert len(a) == 4 and a == b


def test_errors_come_back_from_processes(tmp_path):
    job = jobs.Job(
        table.run,
        {"cells": {"c": {"dataset": "nosuch"}}, "variants": {"niw": {}}},
        {},
        tmp_path,
    )
    keys = [{"cell": "c", "variant": "niw", "seed": seed} for seed in (0, 1)]
    with pytest.raises(InputError, match="'nosuch'"):
        list(jobs.perform([replace(job, key=key) for key in keys], 2, lambda *told: None))
    with pytest.raises(RuntimeError, match="KeyError"):
        list(
            jobs.perform([replace(job, key={"cell": c}) for c in ("x", "y")], 2, lambda *told: None)
        )


LONG = f"""
title = "long"
kind = "table"
seeds = [0]
{COMMON}
[cells.c]
dataset = "digits"
rounds = 4000
checkpoint_every = 50
[variants]
fedavg = {{}}
fedbabu = {{}}
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize(
    ("count", "how"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGINT)]
)
def test_killed_work_goes_on_from_its_checkpoint(tmp_path, count, how):
    """A process is killed in the middle of training.

    Its children end too, and what was trained is not trained again.
    """
    write(tmp_path, LONG, printed="")
    command = [
        sys.executable,
        "-m",
        "fedhb",
        "paper",
        "small",
        "--folder",
        str(tmp_path),
        "--jobs",
        str(count),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while (
        len(
            {
                path.parent
                for path in (tmp_path / "small").glob(".unfinished/*/checkpoint/round-*.json")
            }
        )
        < count
    ):
        assert process.poll() is None and time.monotonic() < until, "no checkpoint"
        time.sleep(0.02)
    below = children(process.pid)
    process.send_signal(how)
    assert process.wait(30) == (130 if how == signal.SIGINT else -9)
    process.stderr.close()
    while any(alive(pid) for pid in below):
        assert time.monotonic() < until, "its children live on"
        time.sleep(0.05)
    assert not records.read(tmp_path / "small/records.jsonl")

    # the rest with few rounds left: by what the first round told
    told = []
    experiment = experiments.load(tmp_path, "small")

    class Stop(Exception):
        pass

    class Watcher(Silent):
        def tell(self, job, share, text):
            told.append(text)
            raise Stop

    with pytest.raises(Stop):
        workbench.complete(
            experiment, experiments.choose(experiment, algorithms=["fedavg"]), 1, Watcher()
        )
    assert int(told[0].split()[1].split("/")[0]) >= 50


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "halves")
    whole, _ = complete(tmp_path / "whole", cells=["one"], algorithms=["fedavg"])
    experiment = experiments.load(tmp_path / "halves", "small")
    keys = experiments.choose(experiment, cells=["one"], algorithms=["fedavg"])

    class Interrupts(Silent):
        def tell(self, job, share, text):
            if text.startswith("round 2"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workbench.complete(experiment, keys, 1, Interrupts())
    assert list((tmp_path / "halves/small").glob(".unfinished/*/checkpoint/round-*.json"))
    halves, _ = complete(tmp_path / "halves", cells=["one"], algorithms=["fedavg"])
    assert [plain(r) for r in halves.made] == [plain(r) for r in whole.made]
    assert not (tmp_path / "halves/small/.unfinished").exists()
