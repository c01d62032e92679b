"""Asking nodes and taking their answers one at a time, as they come. Nothing that was read is kept here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


@dataclass(frozen=True)
class Reply:
    """What came, or did not, from the node that was asked: its content, or None and why."""

    node: int
    content: RecordDict | None
    problem: str = ""


def ask(grid: Grid, questions: Mapping[int, RecordDict], kind: str, group: str, deadline: float, poll: float) -> Iterator[Reply]:
    """Every node's answer to its question, as it comes; then those that did not answer within `deadline` seconds.

    Questions are pushed and answers pulled one by one, so that no more than one answer is in memory.
    """
    waiting: dict[str, int] = {}
    end = time.monotonic() + deadline
    for node, content in questions.items():
        message = Message(content, node, kind, ttl=deadline + 60.0, group_id=group)
        (pushed,) = list(grid.push_messages([message])) or [""]
        if pushed:
            waiting[str(pushed)] = node
        else:
            yield Reply(node, None, "the message could not be sent")
    while waiting:
        for number in list(waiting):
            replies = list(grid.pull_messages([number]))
            if replies:
                node = waiting.pop(number)
                yield _read(node, replies.pop(0))
            for _ in replies:
                yield Reply(node, None, "answered twice: the second answer is ignored")
        if waiting and time.monotonic() > end:
            break
        if waiting:
            time.sleep(poll)
    for node in waiting.values():
        yield Reply(node, None, f"no answer within {deadline:g} s")


def _read(node: int, message: Any) -> Reply:
    if message.has_error():
        return Reply(node, None, f"error {message.error.code}: {str(message.error.reason)[:500]}")
    if message.metadata.src_node_id != node:
        return Reply(node, None, f"the answer comes from node {message.metadata.src_node_id}")
    return Reply(node, message.content)
