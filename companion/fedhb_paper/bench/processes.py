"""Processes of the benchmark: a measurement in a process of its own, a team of forked helpers, memory as the system counts it.

Linux counts a process's peak memory (VmHWM) and lets it be set back; elsewhere the numbers of memory are None.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tell = Callable[[float, str], None]
"""Told the share that is done, and what is measured now."""


def can_fork() -> bool:
    """Whether this system can."""
    return "fork" in multiprocessing.get_all_start_methods()


def apart(
    function: Callable[..., Any], *arguments: Any, tell: Tell = lambda share, what: None
) -> Any:
    """`function(*arguments, tell)` in a forked process with one torch thread: its result, or its exception raised here."""
    if not can_fork():
        return function(*arguments, tell)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        while True:
            try:
                kind, *content = ours.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"the measuring process died with exit code {process.exitcode} (out of memory?)"
                ) from None
            if kind == "told":
                tell(*content)
            elif kind == "failed":
                raise content[0]
            else:
                return content[0]
    finally:
        ours.close()
        process.join(timeout=5.0)
        if process.is_alive():  # we were interrupted: its helpers see that it is gone
            process.kill()
            process.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(
            ("result", function(*arguments, lambda share, what: pipe.send(("told", share, what))))
        )
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(("failed", error))


class Team:
    """`count` forked helpers with one thread each. `team(*arguments)` runs `share(helper, *arguments)` in each and waits.

    Results come back in memory that was shared before the fork (`shared_floats`).
    """

    def __init__(self, count: int, share: Callable[..., None]):
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for helper in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_help, args=(theirs, helper, share), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, *arguments: Any) -> None:
        """One piece of work."""
        for pipe in self._pipes:
            pipe.send(arguments)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        """Stop the helpers."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


def _help(pipe: Connection, helper: int, share: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            while not pipe.poll(timeout=2.0):
                if os.getppid() != parent:
                    return
            share(helper, *pipe.recv())
            pipe.send(None)


def shared_floats(*shape: int) -> Tensor:
    """Zeros of this shape (float32) that forked processes share."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32).view(shape)


# Memory ------------------------------------------------------------------------------------------------------------------


def own_processes() -> list[int]:
    """This process and the helpers it started."""
    return [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid is not None)]


def resident_bytes(processes: Iterable[int]) -> int | None:
    """The memory of these processes, pages that several of them hold counted once (PSS)."""
    try:
        return sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in processes)
    except OSError:
        return None


class PeakMemory:
    """By how much the memory of these processes rose at most since this was made: the sum of each one's own rise."""

    def __init__(self, processes: Iterable[int]):
        self._before: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for pid in processes:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # sets VmHWM back to the present
                self._before[pid] = _field(Path(f"/proc/{pid}/status"), "VmRSS")

    def rise(self) -> int | None:
        """In bytes."""
        peaks = {pid: _field(Path(f"/proc/{pid}/status"), "VmHWM") for pid in self._before}
        return (
            sum(max(0, peak - self._before[pid]) for pid, peak in peaks.items()) if peaks else None
        )


def _field(path: Path, name: str) -> int:
    """A line `Name:  123 kB` of a file in /proc, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
