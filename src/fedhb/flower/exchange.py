"""Asks nodes, and takes their answers one at a time, as they come. No answer is kept here.

Flower's pull waits for minutes for an answer that was announced and whose arrays do not come: a
node that dies in the upload, or is hostile, would hold up the round. So every pull has a thread of
its own, and one that stalls is left behind. A pull raises where an answer's bytes make no message:
the SuperLink looks at the head of an upload, not at its body, and forgets an answer when it hands
it out. Each pull is of one answer, so that no other answer is lost with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

STALL = 5.0
"""Seconds after which a pull that has not ended is left alone, and looked at again in passing."""

UNREADABLE = (DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors that Flower raises where a node's bytes make no message.

Errors on the way to the SuperLink (of httpx, of the operating system) are others: they end the run.
"""


@dataclass(frozen=True)
class Reply:
    """The answer of a node that was asked: its content, or None and the reason."""

    node: int
    content: RecordDict | None
    problem: str = ""


class AnswerThread(threading.Thread):
    """A pull of one answer, in a thread of its own."""

    def __init__(self, grid: Grid, number: str):
        super().__init__(daemon=True)
        self.grid, self.number = grid, number
        self.replies: list[Any] = []
        self.error: BaseException | None = None
        self.unreadable = ""
        self.patience = STALL
        self.start()

    def run(self) -> None:
        """AnswerThread; this runs in the thread."""
        try:
            self.replies = list(self.grid.pull_messages([self.number]))
        except UNREADABLE as error:
            self.unreadable = (
                f"its answer cannot be read ({type(error).__name__}: {str(error)[:200]})"
            )
        except BaseException as error:  # raised again where it is waited for
            self.error = error

    def ended(self) -> bool:
        """Return whether the pull has ended; the first call waits for it a while."""
        self.join(self.patience)
        self.patience = 0.0
        if not self.is_alive() and self.error is not None:
            raise self.error
        return not self.is_alive()


def ask(
    grid: Grid,
    questions: Iterable[tuple[int, RecordDict]],
    kind: str,
    group: str,
    deadline: float,
    poll: float,
) -> Iterator[Reply]:
    """Yield the answer of every node as it comes, then empty ones for nodes that did not answer.

    Questions are pushed and answers pulled one by one, so that at most one answer is in memory.

    Args:
        grid: Flower's way to the nodes.
        questions: the content for each node.
        kind: of the messages.
        group: that the messages belong to.
        deadline: seconds that nodes have to answer.
        poll: seconds between looks for answers.
    """
    waiting: dict[str, int] = {}
    stalled: dict[str, AnswerThread] = {}
    end = time.monotonic() + deadline
    for node, content in questions:
        message = Message(content, node, kind, ttl=deadline + 60.0, group_id=group)
        (pushed,) = list(grid.push_messages([message])) or [""]
        if pushed:
            waiting[str(pushed)] = node
        else:
            yield Reply(node, None, "the message could not be sent")
    while waiting:
        for number in list(waiting):
            pull = stalled.pop(number, None) or AnswerThread(grid, number)
            if not pull.ended():
                stalled[number] = pull
            elif pull.unreadable:
                yield Reply(waiting.pop(number), None, pull.unreadable)
            elif pull.replies:
                node = waiting.pop(number)
                yield _read(node, pull.replies[0])
                for _ in pull.replies[1:]:
                    yield Reply(node, None, "answered twice: the second answer is ignored")
        if waiting and time.monotonic() > end:
            break
        if waiting:
            time.sleep(poll)
    for number, node in waiting.items():
        problem = "its answer was announced but did not come" if number in stalled else "no answer"
        yield Reply(node, None, f"{problem} within {deadline:g} s")


def _read(node: int, message: Any) -> Reply:
    if message.has_error():
        return Reply(node, None, f"error {message.error.code}: {str(message.error.reason)[:500]}")
    if message.metadata.src_node_id != node:
        return Reply(node, None, f"the answer comes from node {message.metadata.src_node_id}")
    if not isinstance(message.content, RecordDict):
        return Reply(
            node, None, f"its answer cannot be read (it holds {type(message.content).__name__})"
        )
    return Reply(node, message.content)
