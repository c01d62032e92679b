"""The executor where a protocol for secure sums stands between clients and server: it gets the cohort's sum and who is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flwr.app import RecordDict

from fedhb.algorithms import Arrays, Plan
from fedhb.algorithms.sums import num_bytes
from fedhb.engine.executor import Traffic
from fedhb.engine.schedule import cohort_size
from fedhb.flower.executor import Federated
from fedhb.flower.records import to_config, to_record
from fedhb.flower.secure import encoding, protocol
from fedhb.seeding import Randomness
from fedhb.updates import Refused, check_finite


class Summed(Federated):
    """Runs cohorts whose answers the server never sees. No single answer can be checked, so the checks are of the sum alone."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.protocol = protocol(self.task.settings.secure_sum)
        clients = cohort_size(len(self.task.census.clients), self.task.settings.fraction)
        self.code = encoding(self.task, self.algorithm, clients, self.protocol.bits)

    @property
    def chosen(self) -> dict[str, Any]:
        """For result.json."""
        return super().chosen | {"secure_sum": self.task.settings.secure_sum}

    def attempt(self, server: Arrays, cohort: Sequence[int], plan: Plan, rng: Randomness) -> tuple[Arrays | None, Traffic]:
        """One try of a round: all stages of the protocol."""
        self.answered, self.seconds = [], {}
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
        total, stayed = self.protocol.sum(self.grid, contents, str(rng.round), self.rules.deadline, self.rules.poll)
        for node in contents:
            if node not in stayed:
                self.told(client_of[node], "it dropped out of the sum", rng.round)
        if len(stayed) < max(1, self.protocol.least):
            return None, Traffic()
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
