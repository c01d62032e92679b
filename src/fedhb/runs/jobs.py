"""Jobs whose results are records, done here or in several processes.

A process has one torch thread, takes a job when it is free, and ends with this one. A job that was
stopped goes on from its checkpoint; its folder is removed when its record is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from fedhb.engine import allocator
from fedhb.errors import DivergedError, InputError
from fedhb.processes import Child, ignoring_interrupts, listen_to_interrupts, start
from fedhb.runs.records import FILE, Inventory, Key, append, identity
from fedhb.runs.session import versions

PATIENCE = 20.0
"""Seconds in which interrupted processes may write their checkpoints."""

UNFINISHED = ".unfinished"
"""The folder, beside the records, of the jobs' checkpoints."""

Tell = Callable[[float, str], None]
"""`tell(share, text)`: this share of a job is done, and the text says what is done now."""

Run = Callable[[Mapping[str, Any], Key, Path, Tell], dict[str, Any]]
"""`run(settings, key, folder, tell)`: do a job, and return its result."""


@dataclass(frozen=True)
class Job:
    """The work for one record.

    Attributes:
        run: a function of a module, called with the other attributes.
        settings: those of the experiment or the tuning that the job is a part of.
        key: the key of the record.
        folder: the place for checkpoints.
    """

    run: Run
    settings: Mapping[str, Any]
    key: Key
    folder: Path


Outcome = tuple[dict[str, Any], float]
"""The result of a job and the seconds it took."""

Watch = Callable[[Job, float, str], None]
"""`watch(job, share, text)`: as `Tell`, for any of several jobs."""


class Watcher(Protocol):
    """An object that is told of the progress of jobs."""

    def begin(self, todo: int) -> None:
        """Start: this number of records is to be made."""
        ...

    def tell(self, job: Job, share: float, text: str) -> None:
        """A job goes on."""
        ...

    def recorded(self, record: Mapping[str, Any]) -> None:
        """A record was written."""
        ...


@dataclass(frozen=True)
class Work:
    """A kind of job, and where its records go.

    Attributes:
        folder: the folder of the records.
        run, settings: as for a `Job`.
        command: the command line that makes the record of a key again.
    """

    folder: Path
    run: Run
    settings: Mapping[str, Any]
    command: Callable[[Key], str]


def record_all(work: Work, inventory: Inventory, processes: int, watcher: Watcher) -> None:
    """Do the work for every key without a valid record, and append its record."""
    made_by = {"commit": commit(), "versions": versions()}
    jobs = []
    for key in inventory.missing:
        text = identity(key) + identity(inventory.settings[identity(key)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        jobs.append(Job(work.run, work.settings, key, work.folder / UNFINISHED / digest))
    watcher.begin(len(jobs))
    for job, (result, seconds) in perform(jobs, processes, watcher.tell):
        spent = result.get("seconds", {})
        if spent.keys() == {"train", "evaluate"}:
            # a run that was stopped in between has taken more than its last process
            seconds = max(seconds, sum(spent.values()))
        record = {
            "key": dict(job.key),
            "result": result,
            "settings": inventory.settings[identity(job.key)],
            "seconds": round(seconds, 3),
            **made_by,
            "command": work.command(job.key),
        }
        append(work.folder / FILE, record)
        shutil.rmtree(job.folder, ignore_errors=True)
        watcher.recorded(record)
    with contextlib.suppress(OSError):  # it is not empty where other work has been begun
        (work.folder / UNFINISHED).rmdir()


def commit() -> str | None:
    """Return the commit of this code, with a + where files have been changed since.

    Outside a repository it is None.
    """
    package = Path(__file__).parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    try:
        # else the package is installed inside somebody else's repository
        git("ls-files", "--error-unmatch", "__init__.py")
        changes = git("status", "--porcelain", "--", ".").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


# ---- one job, several processes


def do(job: Job, tell: Tell) -> Outcome:
    """Do a job in this process. A run that diverges has a result too."""
    started = time.perf_counter()
    try:
        result = job.run(job.settings, job.key, job.folder, tell)
    except DivergedError as error:
        result = {"diverged": str(error)}
    return result, time.perf_counter() - started


def perform(jobs: Sequence[Job], processes: int, watch: Watch) -> Iterator[tuple[Job, Outcome]]:
    """Yield every job with its outcome, in the order in which they finish."""
    if processes > 1 and len(jobs) > 1:
        yield from _in_processes(jobs, min(processes, len(jobs)), watch)
        return
    for job in jobs:
        yield job, do(job, partial(watch, job))


def _in_processes(jobs: Sequence[Job], count: int, watch: Watch) -> Iterator[tuple[Job, Outcome]]:
    waiting = list(jobs)
    children: list[Child] = []
    busy: dict[Connection, tuple[Child, Job]] = {}
    ready: set[Connection] = set()
    try:
        for _ in range(count):
            with ignoring_interrupts():
                child = start("spawn", _serve)
            children.append(child)
            busy[child.pipe] = child, waiting.pop(0)
            child.pipe.send(busy[child.pipe][1])
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                child, job = busy[pipe]
                try:
                    kind, *content = pipe.recv()
                except EOFError:
                    raise RuntimeError(
                        f"the process of {dict(job.key)} died with {child.ending()}"
                    ) from None
                if kind == "ready":
                    ready.add(pipe)
                elif kind == "told":
                    watch(job, *content)
                elif kind == "refused":
                    raise InputError(content[0])
                elif kind == "failed":
                    raise RuntimeError(f"{dict(job.key)} failed:\n{content[0]}")
                else:
                    if waiting:
                        busy[pipe] = child, waiting.pop(0)
                        pipe.send(busy[pipe][1])
                    else:
                        del busy[pipe]
                        pipe.close()
                    yield job, content[0]
    finally:
        for child in children:
            child.pipe.close()  # a busy one fails to tell, keeps its checkpoint and ends
        until = time.monotonic() + PATIENCE  # for all of them together
        for child in children:
            child.stop(until - time.monotonic() if child.pipe in ready else 0.0)


def _serve(pipe: Connection) -> None:
    """Do the jobs that come through the pipe, until it is closed."""
    allocator.keep()
    try:
        listen_to_interrupts()
        pipe.send(("ready",))
        while True:
            job = pipe.recv()
            try:
                pipe.send(("done", do(job, lambda share, text: pipe.send(("told", share, text)))))
            except BrokenPipeError:
                return
            except InputError as error:
                pipe.send(("refused", str(error)))
            except Exception:
                pipe.send(("failed", traceback.format_exc()))
    except KeyboardInterrupt:
        os._exit(0)  # its checkpoint is written; taking torch down in order can take a second
    except (EOFError, BrokenPipeError):
        return
