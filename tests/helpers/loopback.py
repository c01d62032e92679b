"""Flower without a network: nodes in this process, which answer through the real ClientApp and
Flower's own serialisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedhb.flower.client_app import app as client_app
from fedhb.runs.settings import Settings

FIRST = 1000
"""The id of the first node: nodes and clients are not to be mixed up."""


def through_the_wire(message: Message) -> Message:
    """The message as the other side reads it."""
    return message_from_proto(message_to_proto(message))


class Loopback(Grid):
    """Nodes with these configs. `fault(node, message, reply) -> [replies]` stands between a node
    and the server.
    """

    def __init__(
        self,
        configs: Iterable[dict[str, Any]],
        run_config: dict[str, Any],
        fault: Callable[..., Any] | None = None,
    ):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.contexts = {
            FIRST + k: Context(1, FIRST + k, config, RecordDict(), run_config)
            for k, config in enumerate(configs)
        }
        self.keys = {node: f"key {node}".encode() for node in self.contexts}
        self.fault = fault
        self.offline: set[int] = set()
        self.answers: dict[str, list[Message]] = {}
        self.numbers = itertools.count()
        self.sent: list[Message] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = property(lambda self: None)

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise AssertionError("it collects a list of answers")

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.offline]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> str:
        number, node = str(next(self.numbers)), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number
        message = through_the_wire(message)
        self.sent.append(message)
        try:
            reply = client_app(message, self.contexts[node])
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        replies = [reply] if self.fault is None else self.fault(node - FIRST, message, reply)
        self.answers[number] = [through_the_wire(r) for r in replies]
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for number in message_ids for reply in self.answers.pop(number, [])]


SMALL = {
    "dataset": "digits", "num_clients": 4, "shards_per_client": 4, "max_examples": 60, "fraction": 0.5, "rounds": 3,
    "batch_size": 10, "personal_epochs": 1, "workers": 1,
}  # fmt: skip
TOLERANCE = 2e-4
"""One client at a time and several at once add in another order: float32, amplified by some sixty
steps of SGD.
"""


def small(algorithm: str, **changes: Any) -> Settings:
    """The settings of a small run on digits."""
    return Settings.resolve(
        {**SMALL, "algorithm": algorithm, "model": {"name": "mlp", "hidden": 6}, **changes}, {}
    )


def config(settings: Settings, out: Path, **rules: Any) -> dict[str, Any]:
    """The run config of the server."""
    return {
        "settings": settings.to_toml({}),
        "out": str(out),
        "nodes": 4,
        "poll": 0.001,
        "deadline": 2.0,
        **rules,
    }


def federation(settings: Settings, out: Path, **rules: Any) -> tuple[Loopback, dict[str, Any]]:
    """A grid with a node for every client, and the run config."""
    chosen = config(settings, out, **rules)
    return Loopback([{"partition-id": k} for k in range(settings.num_clients)], chosen), chosen


def close(ours: Any, theirs: Any, what: str) -> None:
    """Check that two dictionaries of arrays have the same keys and nearly the same values."""
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(
            ours[key],
            theirs[key],
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text, key=key: f"{what} {key}: {text}",
        )


def patients(client: int, settings: Any) -> Any:
    """An owner's function: the training and test examples of this client."""
    rng = np.random.default_rng(client)
    return (rng.normal(size=(20, 4)), rng.integers(0, 2, 20)), None


def own_files(folder, regression: int):
    """Four owners' files, and the same data as one file with a column `client`: labels, one real
    target, or three.
    """
    rng, parts = np.random.default_rng(3), []
    for k in range(4):
        n = 30 + 7 * k
        x = rng.normal(loc=k, scale=1 + k, size=(n, 5)).astype(np.float32)
        y = (
            (x[:, 0] * 2 + rng.normal(size=n)).astype(np.float32)
            if regression
            else rng.integers(0, 3, n)
        )
        y = (
            np.stack([y, 1000 - 300 * x[:, 1], np.full_like(y, 0.1)], axis=1)
            if regression > 1
            else y
        )
        split = ((np.arange(n) % 5 == 0) & (k != 2)).astype(np.int64)  # client 2 has no test rows
        np.savez(folder / f"{k}.npz", x=x, y=y, split=split)
        parts.append((x, y, split, np.full(n, k)))
    x, y, split, client = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    np.savez(folder / "all.npz", x=x, y=y, split=split, client=client)
