"""Processes of the benchmark: one for a measurement, and a team of helpers that share its work."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedhb.processes import can_fork, start

Tell = Callable[[float, str], None]
"""`tell(share, text)`: this share is done, and the text says what is measured now."""

PATIENCE = 5.0
"""Seconds in which a measuring process may end by itself."""


def apart(
    function: Callable[..., Any], *arguments: Any, tell: Tell = lambda share, text: None
) -> Any:
    """Call `function(*arguments, tell)` in a forked process with one torch thread.

    Returns:
        Its result; its exception is raised here.
    """
    if not can_fork():
        return function(*arguments, tell)
    child = start("fork", _answer, function, arguments)
    try:
        while True:
            try:
                kind, *content = child.pipe.recv()
            except EOFError:
                raise RuntimeError(f"the measuring process died with {child.ending()}") from None
            if kind == "told":
                tell(*content)
            elif kind == "failed":
                raise content[0]
            else:
                return content[0]
    finally:
        child.stop(PATIENCE)


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    def tell(share: float, text: str) -> None:
        pipe.send(("told", share, text))

    try:
        pipe.send(("result", function(*arguments, tell)))
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(("failed", error))


class Team:
    """`count` forked helpers with one thread each.

    `team(*arguments)` runs `share(helper, *arguments)` in each of them and waits until all are
    done. Results come back in memory that was shared before the fork (`shared_floats`).
    """

    def __init__(self, count: int, share: Callable[..., None]):
        self._helpers = [
            start("fork", _help, helper, share, daemon=True) for helper in range(count)
        ]

    def __call__(self, *arguments: Any) -> None:
        """Do one piece of work."""
        for helper in self._helpers:
            helper.pipe.send(arguments)
        for helper in self._helpers:
            helper.pipe.recv()

    def close(self) -> None:
        """Stop the helpers."""
        for helper in self._helpers:
            helper.stop()


def _help(pipe: Connection, helper: int, share: Callable[..., None]) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            share(helper, *pipe.recv())
            pipe.send(None)


def shared_floats(*shape: int) -> Tensor:
    """Return zeros of this shape (float32) that forked processes share."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32).view(shape)
