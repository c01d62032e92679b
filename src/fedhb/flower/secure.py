"""Only sums: the server learns the sum over the cohort and no client's part of it.

This is the place for a protocol, and everything around one: fixed point, the round, drop-out, what is refused. There is no
protocol in it: docs/security.md says why none of those that exist can be used with this version of Flower. One is named by the
setting `secure_sum = "pkg.mod:protocol"` and is imported by server and nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedhb.algorithms import Algorithm
from fedhb.errors import InputError
from fedhb.fixedpoint import Encoding
from fedhb.flower.task import Task
from fedhb.seeding import Randomness
from fedhb.values import imported

KIND = "train.secure"
"""The type of a protocol's messages: whatever its stages are, the ClientApp hands them to `client`."""


class SecureSum(Protocol):
    """What a protocol must do. Vectors are uint64, their sums modulo 2^bits.

    Attributes:
        bits: of the modulus.
        least: it gives no sum of fewer clients than this.
    """

    bits: int
    least: int

    def client(self, message: Message, context: Context, contribute: Callable[[], np.ndarray]) -> Message:
        """A node's answer to a message of any stage. `contribute()` trains, and is called in the stage that masks its result.

        The message's content has the records of `sum`'s content ("received", "order") in that stage.
        """
        ...

    def sum(
        self, grid: Grid, contents: dict[int, RecordDict], group: str, least: int, deadline: float, poll: float
    ) -> tuple[np.ndarray, list[int]]:
        """All stages with these nodes: the sum over those that stayed to the end, and which they are.

        Nodes that drop out in any stage are left out of the sum. With fewer than `least` left (never under its own) nothing
        is unmasked: ([], []). `group` is the round, in all its attempts. The server sees to it that no two sums of a round over
        different clients are unmasked, for their difference is those clients' own; a protocol whose nodes do not take its word
        for that lets a node help to unmask one sum of a group.
        """
        ...


def protocol(name: str) -> SecureSum:
    """A protocol by its name."""
    if ":" not in name:
        raise InputError(
            f"secure_sum={name!r}: no protocol for secure sums can be used with this version of Flower (docs/security.md); "
            "name one of your own, pkg.mod:protocol"
        )
    found: SecureSum = imported("secure_sum", name, "protocol")
    if not all(hasattr(found, part) for part in ("bits", "least", "client", "sum")):
        raise InputError(f"secure_sum={name!r} is no protocol: it needs bits, least, client and sum (fedhb/flower/secure.py)")
    return found


def encoding(task: Task, algorithm: Algorithm, clients: int, bits: int) -> Encoding:
    """How a cohort's sums are encoded: known to all, for the shapes of the sums are."""
    if not algorithm.sends:
        raise InputError(f"secure_sum with {algorithm.name}: its clients send nothing to sum")
    rng, found = Randomness(task.settings.seed), task.sample_answer()
    received = algorithm.broadcast(algorithm.start(task.problem, rng), list(task.census.clients[:1]))
    sums = algorithm.summarise(task.problem, received, found, rng)
    return Encoding({key: tuple(value.shape) for key, value in sums.items()}, clients, bits)
