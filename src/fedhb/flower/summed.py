"""The executor where a protocol for secure sums stands between clients and server: it gets the cohort's sum and who is in it.

Two sums of a round over different clients would tell what those clients contributed that are in one of them. So nothing is
unmasked that would be too little for the round, and once a sum was, whatever became of it, the round is summed over the very same
clients again or not at all. OUT/summed.json has who they were, for the server may be killed before the round counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict

from fedhb.algorithms import Arrays, Plan
from fedhb.algorithms.sums import num_bytes
from fedhb.engine.checkpoint import KEPT
from fedhb.engine.executor import Traffic
from fedhb.engine.folder import RunFolder
from fedhb.engine.schedule import cohort_size
from fedhb.files import sealed, write_atomically
from fedhb.flower.executor import Federated
from fedhb.flower.records import to_config, to_record
from fedhb.flower.secure import encoding, protocol
from fedhb.seeding import Randomness
from fedhb.updates import Refused, check_finite

SUMMED = "summed.json"
"""The clients of the sums that were unmasked in the last rounds."""


class Summed(Federated):
    """Runs cohorts whose answers the server never sees. No single answer can be checked, so the checks are of the sum alone."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.protocol = protocol(self.task.settings.secure_sum)
        clients = cohort_size(len(self.task.census.clients), self.task.settings.fraction)
        self.code = encoding(self.task, self.algorithm, clients, self.protocol.bits)
        self.summed: dict[int, list[int]] = {}
        folder = self.journal.folder
        if folder is not None and (folder / SUMMED).exists():
            kept = RunFolder(folder).read_json(SUMMED, required=True)
            self.summed = {int(r): list(who) for r, who in kept["rounds"].items()}

    @property
    def chosen(self) -> dict[str, Any]:
        """For result.json."""
        return super().chosen | {"secure_sum": self.task.settings.secure_sum}

    def attempt(self, server: Arrays, cohort: Sequence[int], plan: Plan, rng: Randomness) -> tuple[Arrays | None, Traffic]:
        """One try of a round: all stages of the protocol."""
        self.answered, self.seconds = [], {}
        least = max(1, self.protocol.least, self.rules.needed(len(cohort)))
        before = self.summed.get(rng.round)
        if before is not None:
            cohort, least = before, len(before)
        online, members, contents = self.roster.online(), self.roster.members, {}
        order = {"plan": dataclasses.asdict(plan), "round": rng.round, "attempt": self.attempts, "cohort": self.code.clients}
        down = 0
        for client in cohort:
            if client in members and members[client].node in online:
                received = self.algorithm.broadcast(server, [client])
                own = to_config(self.common | {"counted": self.counted.get(client, 0)} | order)
                contents[members[client].node] = RecordDict({"received": to_record(received), "order": own})
                down += num_bytes(received)
            else:
                self.told(client, "its node is not connected", rng.round)
        client_of = {members[c].node: c for c in cohort if c in members}
        total, stayed = np.zeros(0, np.uint64), list[int]()
        if len(contents) >= least:
            group, deadline, poll = str(rng.round), self.rules.deadline, self.rules.poll
            total, stayed = self.protocol.sum(self.grid, contents, group, least, deadline, poll)
            for node in contents:
                if node not in stayed:
                    self.told(client_of[node], "it dropped out of the sum", rng.round)
        if len(stayed) < least:
            if before is not None:
                self.journal.note(
                    "sum withheld",
                    f"this round was summed over clients {before} before, and over others it would tell what single clients "
                    "contributed: start their nodes, or train again in another folder",
                    round_number=rng.round,
                )
            return None, Traffic()
        self.keep(rng.round, [client_of[node] for node in stayed])
        try:
            sums = self.code.decode(total)
            check_finite(sums)
            if round(float(sums["count"])) != len(stayed):
                raise Refused(f"the sum says it is of {float(sums['count']):g} clients, and {len(stayed)} stayed")
            self.check_examples(sums, [client_of[node] for node in stayed])
        except (Refused, ValueError) as reason:
            self.journal.note("sum refused", str(reason), round_number=rng.round)
            return None, Traffic()
        self.answered = [client_of[node] for node in stayed]
        up = len(stayed) * (self.code.length * 8)
        return sums, Traffic(down, up)

    def keep(self, round_number: int, clients: Sequence[int]) -> None:
        """A sum over these clients was unmasked. A resumed run may go back as far as its checkpoints do."""
        self.summed = {r: who for r, who in self.summed.items() if r > round_number - KEPT} | {round_number: sorted(clients)}
        if self.journal.folder is not None:
            write_atomically(self.journal.folder / SUMMED, sealed({"rounds": {str(r): who for r, who in self.summed.items()}}))

    def check_examples(self, sums: Arrays, clients: Sequence[int]) -> None:
        """Refuse a sum of other weights than these clients have together (none where it is private: they count alike)."""
        known = sum(self.roster.facts[client].examples for client in clients)
        if "examples" in sums and round(float(sums["examples"])) != known:
            raise Refused(f"the sum says it is of {float(sums['examples']):g} examples, and those that stayed have {known}")
        if "weight" in sums and not float(sums["weight"]) > 0:
            raise Refused(f"the sum has weight {float(sums['weight']):g}")

    def told(self, client: int, why: str, round_number: int) -> None:
        """A client that is not in the sum."""
        self.journal.note("answer missing", why, round_number=round_number, **self.roster.who(client))
