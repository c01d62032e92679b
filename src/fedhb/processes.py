"""Child processes: how one is started, and how it ends with the process that started it.

Every child has one torch thread and one end of a pipe; a `Child` holds the other end. A child is
killed when its parent ends, however that happens: on Linux the system does it, elsewhere a thread
of the child looks for the parent from time to time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

LOOK = 2.0
"""Seconds between two looks for the parent, where the system does not watch it for us."""

NO_MEMORY = 77
"""The exit code of a child that could not allocate memory."""

ENDS = {NO_MEMORY: "out of memory", -signal.SIGKILL: "killed; by the system, if memory is short"}
"""The meaning of exit codes, where it is known."""

_pipes: WeakSet[Connection] = WeakSet()
"""The ends of pipes that this process holds as a parent."""


@dataclass
class Child:
    """A child process, and this side of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def ending(self) -> str:
        """Wait until the process has ended, and return its exit code and what that means."""
        self.process.join()
        code = self.process.exitcode
        return f"exit code {code}" + (f", {ENDS[code]}" if code in ENDS else "")

    def stop(self, patience: float = 0.0) -> None:
        """Close the pipe, give the process `patience` seconds to end by itself, then kill it."""
        self.pipe.close()
        if patience > 0:
            self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def can_fork() -> bool:
    """Return whether this system can fork a process."""
    return "fork" in multiprocessing.get_all_start_methods()


def start(method: str, target: Callable[..., None], *arguments: Any, daemon: bool = False) -> Child:
    """Run `target(pipe, *arguments)` in a child process.

    Args:
        method: "fork" (the child has the memory of this process) or "spawn" (it imports `target`).
        target: the function; it ends when it reads the end of the pipe.
        arguments: its other arguments.
        daemon: whether the child has no children of its own and is killed when this process exits.
    """
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(
        target=_begin, args=(os.getpid(), there, target, arguments), daemon=daemon
    )
    _pipes.add(here)
    process.start()
    there.close()
    return Child(process, here)


def _begin(
    parent: int, pipe: Connection, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    end_with(parent)
    for end in list(_pipes):  # a fork copies them: a child must see when the parent closes its own
        end.close()
    _pipes.clear()
    import torch

    torch.set_num_threads(1)
    target(pipe, *arguments)


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, however that happens.

    Args:
        parent: the process id of the parent, which may have ended before this is called.
    """
    watched = False
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        watched = ctypes.CDLL(None).prctl(1, signal.SIGKILL) == 0  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    if not watched:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Start children that ignore Ctrl-C until they ask for it with `listen_to_interrupts`.

    A child that is stopped while it imports would print where it was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def listen_to_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt in this process from now on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
