"""Which node is which client.

A client belongs to the key of its first node; no node with another key can take its place.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedhb.errors import InputError
from fedhb.flower.census import Census, Facts
from fedhb.flower.exchange import ask
from fedhb.flower.federated_task import Rules
from fedhb.flower.journal import Journal
from fedhb.flower.wire import to_config

QUERY_DEADLINE = 120.0
SILENCE = 300.0
"""Seconds after which a node that did not answer is asked again: rounds do not wait every time."""


@dataclass(frozen=True)
class Member:
    """A client's node, and the fingerprint of its key ("" where nodes have no keys)."""

    node: int
    key: str


class Roster:
    """The nodes that are there, and their clients."""

    def __init__(self, grid: Grid, rules: Rules, journal: Journal):
        self.grid, self.rules, self.journal = grid, rules, journal
        self.members: dict[int, Member] = {}
        self.facts: dict[int, Facts] = {}
        self.owners: dict[int, str] = {}
        self._ask_again: dict[int, float] = {}  # when, for nodes that were asked

    def online(self) -> dict[int, str]:
        """Return the nodes that are connected now, each with the fingerprint of its key."""
        return {node.node_id: fingerprint(node.public_key) for node in self.grid.get_nodes()}

    def refresh(self) -> dict[int, str]:
        """Ask new nodes which clients they are; return the nodes that are connected."""
        online = self.online()
        new = [node for node in online if self._ask_again.get(node, 0.0) <= time.monotonic()]
        question = to_config({"question": "census"})
        questions = [(node, RecordDict({"question": question})) for node in new]
        deadline = min(QUERY_DEADLINE, self.rules.deadline)
        for reply in ask(self.grid, questions, "query", "census", deadline, self.rules.poll):
            key = online[reply.node]
            self._ask_again[reply.node] = math.inf  # it would say the same again
            try:
                if reply.content is None:
                    raise ValueError(reply.problem)
                facts = Facts.read(str(reply.content["facts"]["facts"]))
                self.enter(reply.node, key, facts, online)
            except (ValueError, KeyError, TypeError) as error:
                self.journal.note("node refused", str(error), node=reply.node, key=key)
                if reply.content is None:
                    self._ask_again[reply.node] = time.monotonic() + SILENCE
        return online

    def enter(self, node: int, key: str, facts: Facts, online: dict[int, str]) -> None:
        """Enter a node's client; refuse one that belongs to another node."""
        before = self.members.get(facts.client)
        if self.owners.setdefault(facts.client, key) != key:
            raise ValueError(f"it says it is client {facts.client}, which belongs to another key")
        if before is not None and before.node != node and before.node in online and not key:
            raise ValueError(f"it says it is client {facts.client}, which is node {before.node}")
        self.members[facts.client], self.facts[facts.client] = Member(node, key), facts

    def gather(self, tell: Callable[[str], None]) -> Census:
        """Wait until as many clients are there as must be; return their census."""
        end, told = time.monotonic() + self.rules.patience, -1
        while len(self.members) < self.rules.nodes:
            self.refresh()
            if len(self.members) != told:
                told = len(self.members)
                tell(f"{told} of {self.rules.nodes} nodes are here")
            if len(self.members) < self.rules.nodes:
                if time.monotonic() > end:
                    raise InputError(
                        f"only {len(self.members)} of {self.rules.nodes} nodes came within "
                        f"{self.rules.patience:g} s: start the others, or ask for fewer (nodes)"
                    )
                time.sleep(4 * self.rules.poll)
        return Census.of(list(self.facts.values()))

    def wait(self, clients: Sequence[int], needed: int, patience: float) -> None:
        """Wait until so many of these clients are connected, at most `patience` seconds."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            online = self.refresh()
            if sum(c in self.members and self.members[c].node in online for c in clients) >= needed:
                return
            time.sleep(4 * self.rules.poll)

    def describe(self, client: int) -> dict[str, Any]:
        """Return a client, its node and its key, for the journal."""
        member = self.members.get(client)
        return {
            "client": client,
            "node": member.node if member else None,
            "key": member.key if member else "",
        }


def fingerprint(public_key: bytes) -> str:
    """Return the first half of a key's SHA-256; nothing for no key."""
    return hashlib.sha256(public_key).hexdigest()[:32] if public_key else ""
