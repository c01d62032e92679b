"""Stands for a protocol of secure sums: the server sees masked vectors, and learns their sum from a dealer whom all trust.

It protects nobody. It shows that everything around a protocol works with sums alone.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedhb.flower.secure import KIND
from fedhb.flower.talk import ask


class Dealer:
    """One pad for every node and round; the dealer tells the sum of the pads of those that stayed."""

    least = 2

    def __init__(self, bits: int = 64):
        self.bits, self.seen, self.unmasked = bits, [], []

    def pad(self, node: int, group: str, length: int) -> np.ndarray:
        return np.random.default_rng([node, int(group)]).integers(0, 2**64, length, dtype=np.uint64)

    def client(self, message, context, contribute) -> Message:
        vector = contribute()
        masked = vector + self.pad(message.metadata.dst_node_id, message.metadata.group_id, len(vector))
        return Message(RecordDict({"masked": ArrayRecord({"vector": Array(masked)})}), reply_to=message)

    def sum(self, grid, contents, group, least, deadline, poll):
        total, stayed = None, []
        for reply in ask(grid, contents.items(), KIND, group, deadline, poll):
            if reply.content is not None:
                masked = reply.content["masked"]["vector"].numpy()
                self.seen.append(masked)
                part = masked - self.pad(reply.node, group, len(masked))
                total = part if total is None else total + part
                stayed.append(reply.node)
        if total is None or len(stayed) < max(least, self.least):
            return np.zeros(0, np.uint64), []
        self.unmasked.append((int(group), sorted(stayed)))
        return total & np.uint64(2**self.bits - 1), stayed


wide, narrow = Dealer(), Dealer(52)
