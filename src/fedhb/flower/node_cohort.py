"""The engine's executor on Flower: a cohort's answers come over the network, one at a time, into sums.

The server's memory is O(d): an answer passes the gate, is folded and forgotten. A round with too few answers is tried again
as a whole; nothing of the failed attempt is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid

from fedhb.algorithms import Algorithm, Arrays, Plan
from fedhb.algorithms.toolbox import add, answer_bytes, received_bytes
from fedhb.answers.admission import (
    Lengths,
    Refused,
    check_alike,
    check_finite,
    check_metrics,
    check_values,
)
from fedhb.answers.defence import Defended, labelled
from fedhb.engine.cohort import Sums, Traffic
from fedhb.engine.loop import State
from fedhb.errors import DivergedError
from fedhb.flower.exchange import Reply, ask
from fedhb.flower.federated_task import Rules, Task
from fedhb.flower.journal import Journal
from fedhb.flower.roster import Roster
from fedhb.flower.wire import to_arrays, to_config, to_record
from fedhb.runs.run import Run
from fedhb.seeding import Randomness

STRAGGLERS = 60.0
"""Seconds that the evaluation waits for nodes that are not connected."""


class Federated:
    """Runs cohorts on nodes. It is also the callback that records who answered."""

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        grid: Grid,
        roster: Roster,
        rules: Rules,
        journal: Journal,
        counted: Mapping[int, int],
    ):
        self.algorithm = algorithm
        self.task, self.grid, self.roster, self.rules, self.journal = (
            task,
            grid,
            roster,
            rules,
            journal,
        )
        self.sample = task.sample_answer()
        self.lengths = Lengths(self.sample, algorithm.answer, rules.max_growth)
        self.common = {"census": task.census.to_json(), "network": task.network_digest()}
        self.counted = dict(counted)
        self.answered: list[int] = []
        self.attempts = 0
        self.seconds: dict[str, float] = {}

    @property
    def chosen(self) -> dict[str, Any]:
        """For result.json."""
        return {
            "engine": "flower",
            "nodes": len(self.task.census.clients) + len(self.task.census.holdout),
        }

    @property
    def note(self) -> str:
        """How many answered, for the progress."""
        return f"  {len(self.answered)} answers"

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """The summed statistics of the clients at these positions that answered, and what was sent."""
        cohort = [self.task.census.clients[k] for k in positions]
        needed = self.rules.needed(len(cohort))
        for attempt in range(1, self.rules.retries + 2):
            self.attempts = attempt
            self.roster.wait(cohort, needed, self.rules.patience)
            total, traffic = self.attempt(server, cohort, plan, rng)
            if total is not None and len(self.answered) >= needed:
                self.lengths.settle()
                return total, traffic
            self.journal.note(
                "round failed",
                f"{len(self.answered)} of {len(cohort)} clients answered, {needed} must: attempt {self.attempts}",
                round_number=rng.round,
            )
        raise DivergedError(
            f"round {rng.round}: too few answers in {self.attempts} attempts: see events.jsonl for each node's reason, "
            "then resume; allow more time (deadline), fewer answers (min_answers), or lower the learning rate where they are NaN"
        )

    def attempt(
        self, server: Arrays, cohort: Sequence[int], plan: Plan, rng: Randomness
    ) -> tuple[Arrays | None, Traffic]:
        """One try of a round."""
        total, traffic, algorithm = None, Traffic(), self.algorithm
        self.answered, self.seconds = [], {}
        common = None if algorithm.each else to_record(algorithm.broadcast(server, cohort[:1]))
        order = {"plan": dataclasses.asdict(plan), "round": rng.round, "attempt": self.attempts}

        def sent(client: int) -> ArrayRecord:
            return (
                common if common is not None else to_record(algorithm.broadcast(server, [client]))
            )

        for client, reply in self.questions(cohort, sent, order, "train"):
            try:
                found = self.admit(client, reply, rng.round)
                received = algorithm.broadcast(server, [client])
                part = self.summarise(received, found, rng)
                check_finite(part)
                part = labelled(part, client) if isinstance(algorithm, Defended) else part
            except Refused as reason:
                self.journal.note(
                    "answer refused", str(reason), round_number=rng.round, **self.roster.who(client)
                )
                continue
            total = add(total, part)
            self.lengths.note(found)
            self.answered.append(client)
            if algorithm.sends:
                down, up = received_bytes(algorithm, received, 1), answer_bytes(algorithm, found)
                traffic = Traffic(traffic.down + down, traffic.up + up)
        return total, traffic

    def admit(self, client: int, reply: Reply, round_number: int) -> Arrays:
        """What a client found, after every check."""
        if reply.content is None:
            raise Refused(reply.problem)
        try:
            about, found = (
                reply.content["about"],
                to_arrays(reply.content["found"], self.task.settings.device),
            )
            said = {key: about[key] for key in ("client", "round", "attempt", "lost")}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Refused(f"it is not an answer ({error})") from None
        expected = {"client": client, "round": round_number, "attempt": self.attempts}
        if any(said[key] != value for key, value in expected.items()):
            raise Refused(f"it is the answer of {said} and not of {expected}")
        check_alike(found, self.sample)
        check_finite(found)
        examples, most = self.roster.facts[client].examples, self.task.census.num_examples
        check_values(found, self.algorithm.answer, client, examples, most)
        if (
            not self.task.settings.dp_noise
        ):  # in private runs no client decides who else counts; clipping bounds them all
            self.lengths.check(found)
        for key in ("work_seconds", "process_seconds"):
            value = about.get(key)
            if isinstance(value, float) and math.isfinite(value):
                self.seconds[key] = max(value, self.seconds.get(key, 0.0))
        if said["lost"]:
            self.journal.note(
                "memory lost",
                "the node no longer has what the client remembered: it began anew",
                round_number=round_number,
                **self.roster.who(client),
            )
        return found

    def summarise(self, received: Arrays, found: Arrays, rng: Randomness) -> Arrays:
        """The client's part of the sums. Numbers that no client of this algorithm finds may fail anywhere in it."""
        try:
            return self.algorithm.summarise(self.task.problem, received, found, rng)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise Refused(
                f"it cannot be summed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from None

    def questions(
        self,
        clients: Sequence[int],
        sent: Callable[[int], ArrayRecord],
        order: dict[str, Any],
        kind: str,
    ) -> Iterator[tuple[int, Reply]]:
        """Ask these clients, and take their answers as they come. Clients whose node is not here answer so at once.

        What is `sent` to a client is made when it is sent.
        """
        online, members = self.roster.online(), self.roster.members
        client_of = {
            members[c].node: c for c in clients if c in members and members[c].node in online
        }
        for client in clients:
            if client not in client_of.values():
                yield client, Reply(0, None, "its node is not connected")

        def content(client: int) -> RecordDict:
            own = to_config(self.common | {"counted": self.counted.get(client, 0)} | order)
            return RecordDict({"received": sent(client), "order": own})

        every = ((node, content(client)) for node, client in client_of.items())
        for reply in ask(
            self.grid, every, kind, str(order["round"]), self.rules.deadline, self.rules.poll
        ):
            yield client_of[reply.node], reply

    def evaluate(self, result: Run, split: str) -> tuple[dict[int, Any], dict[int, Any]]:
        """The metrics of every client's global and personalised predictions, by its id. They are all that the server sees."""
        census, rng = self.task.census, result.rng
        record = to_record(result.state.server)
        order = {"split": split, "round": rng.round, "attempt": 0}
        everyone = (*census.clients, *census.holdout)
        self.roster.wait(everyone, len(everyone), min(self.rules.patience, STRAGGLERS))
        before: dict[int, Any] = {}
        after: dict[int, Any] = {}
        names: list[str] = []
        for client, reply in self.questions(everyone, lambda client: record, order, "evaluate"):
            try:
                if reply.content is None:
                    raise Refused(reply.problem)
                if "global" not in reply.content:
                    continue  # the client holds nothing back
                names = names or self.metric_names()
                found = [
                    check_metrics(dict(reply.content[task]), names)
                    for task in ("global", "personalised")
                ]
            except (Refused, KeyError, TypeError, ValueError) as reason:
                self.journal.note(
                    "evaluation refused",
                    str(reason),
                    round_number=rng.round,
                    **self.roster.who(client),
                )
                continue
            before[client], after[client] = found
        return before, after

    def metric_names(self) -> list[str]:
        """The metrics of this likelihood, the main one first."""
        likelihood, clients = self.task.problem.likelihood, self.task.census.specimen()
        outputs = torch.zeros(2, likelihood.num_outputs)
        return list(likelihood.metrics(likelihood.predictive(outputs), clients.train.y))

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Who answered is kept with the round, and with the state: their memories count, and a resumed run knows."""
        record["answered"], record["attempts"], record["node_seconds"] = (
            sorted(self.answered),
            self.attempts,
            self.seconds,
        )
        self.counted |= dict.fromkeys(self.answered, record["round"])
        if (
            not self.task.settings.dp_noise
        ):  # a private run's model is given away, and who took part is secret
            state.counted = dict(self.counted)

    def close(self) -> None:
        """Nothing to release."""
