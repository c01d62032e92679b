"""Work in this process, or in several: each has one torch thread, takes a job when it is free, and dies with this one."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedhb.engine import allocator
from fedhb.errors import DivergedError, InputError
from fedhb_paper.records import Key

PATIENCE = 20.0
"""Seconds in which interrupted processes may write their checkpoints."""


@dataclass(frozen=True)
class Job:
    """One record's work: the kind's module, the experiment's settings, the record's key, and a folder for checkpoints."""

    kind: str
    settings: Mapping[str, Any]
    key: Key
    folder: Path


Outcome = tuple[dict[str, Any], float]
"""The result and the seconds it took."""

Watch = Callable[[Job, float, str], None]
"""Told of a job, the share that is done, and what is done now."""


def do(job: Job, tell: Callable[[float, str], None]) -> Outcome:
    """A job here. A run that diverges has a result too."""
    begun = time.perf_counter()
    try:
        result = importlib.import_module(job.kind).run(job.settings, job.key, job.folder, tell)
    except DivergedError as error:
        result = {"diverged": str(error)}
    return result, time.perf_counter() - begun


def perform(jobs: Sequence[Job], processes: int, watch: Watch) -> Iterator[tuple[Job, Outcome]]:
    """Every job with its outcome, in the order in which they finish."""
    if processes > 1 and len(jobs) > 1:
        yield from _in_processes(jobs, min(processes, len(jobs)), watch)
        return
    for job in jobs:
        yield job, do(job, partial(watch, job))


def _in_processes(jobs: Sequence[Job], count: int, watch: Watch) -> Iterator[tuple[Job, Outcome]]:
    # spawned, not forked: a fork would inherit the pipes of the others, and never see that this process has died
    context, waiting = multiprocessing.get_context("spawn"), list(jobs)
    busy: dict[Connection, tuple[Any, Job]] = {}
    processes = []
    ready: set[Connection] = set()
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))
            with _deaf():
                process.start()
            theirs.close()
            processes.append((process, ours))
            busy[ours] = (process, waiting.pop(0))
            ours.send(busy[ours][1])
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                process, job = busy[pipe]
                try:
                    kind, *content = pipe.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(
                        f"the process of {dict(job.key)} died with code {process.exitcode} (memory?)"
                    ) from None
                if kind == "ready":
                    ready.add(pipe)
                    continue
                if kind == "told":
                    watch(job, *content)
                    continue
                if kind == "refused":
                    raise InputError(content[0])
                if kind == "failed":
                    raise RuntimeError(f"{dict(job.key)} failed:\n{content[0]}")
                if waiting:
                    busy[pipe] = (process, waiting.pop(0))
                    pipe.send(busy[pipe][1])
                else:
                    del busy[pipe]
                    pipe.close()
                yield job, content[0]
    finally:
        for _, pipe in processes:
            pipe.close()  # whoever is at work fails to tell, keeps its checkpoint and ends
        until = time.monotonic() + PATIENCE  # for all of them together
        for process, pipe in processes:
            process.join(max(0.0, until - time.monotonic()) if pipe in ready else 0)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start here do not hear Ctrl-C until they are ready: they would print where they were stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection) -> None:
    import torch

    allocator.keep()
    torch.set_num_threads(1)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pipe.send(("ready",))
        while True:
            job = pipe.recv()
            try:
                pipe.send(("done", do(job, lambda share, text: pipe.send(("told", share, text)))))
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    return
                pipe.send(("failed", traceback.format_exc()))
            except InputError as error:
                pipe.send(("refused", str(error)))
            except Exception:
                pipe.send(("failed", traceback.format_exc()))
    except KeyboardInterrupt:
        os._exit(0)  # its checkpoint is written; taking torch down in order can take a second
    except (EOFError, BrokenPipeError):
        return
