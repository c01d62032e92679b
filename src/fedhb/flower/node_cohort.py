"""The engine's executor on Flower: answers come over the network, one at a time, into sums.

The server's memory is O(d): an answer passes the gate, is added to the sums and is forgotten. A
round with too few answers is tried again as a whole; nothing of the failed attempt is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict

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
from fedhb.engine.loop import Engine, State
from fedhb.engine.timetable import Timetable
from fedhb.errors import FailedRoundError, reason
from fedhb.evaluation.evaluate import Metrics
from fedhb.flower.exchange import Reply, ask
from fedhb.flower.federated_task import FederatedTask
from fedhb.flower.roster import Roster
from fedhb.flower.wire import to_arrays, to_config, to_record
from fedhb.runs.run import Run
from fedhb.seeding import Randomness

STRAGGLERS = 60.0
"""Seconds that the evaluation waits for nodes that are not connected."""


class Federated(Engine):
    """Trains cohorts on nodes, and records which clients answered.

    Args:
        task: what server and nodes have alike.
        algorithm: as it is trained, with its filters or its noise.
        timetable: the phases before and after the rounds, as they are carried out.
        roster: the nodes.
        counted: the round of each client's last answer that counted.
    """

    def __init__(
        self,
        task: FederatedTask,
        algorithm: Algorithm,
        timetable: Timetable,
        roster: Roster,
        counted: Mapping[int, int],
    ):
        self.task, self.algorithm, self.roster = task, algorithm, roster
        self.timetable, self.steps = timetable, algorithm
        self.grid, self.rules, self.journal = roster.grid, roster.rules, roster.journal
        self.sample = task.sample_answer(task.algorithm)
        self.lengths = Lengths(self.sample, algorithm.answer, self.rules.max_growth)
        self.common = {"census": task.census.to_json(), "task": task.shared_hash()}
        self.private = task.settings.privacy.noise > 0
        self.counted = dict(counted)
        self.answered: list[int] = []
        self.attempts = 0
        self.seconds: dict[str, float] = {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The engine and the number of nodes, for result.json."""
        census = self.task.census
        return {"engine": "flower", "nodes": len(census.clients) + len(census.holdout)}

    @property
    def note(self) -> str:
        """How many clients answered, for the progress."""
        return f"  {len(self.answered)} answers"

    def run(self, server: Arrays, positions: Sequence[int], plan: Plan, rng: Randomness) -> Sums:
        """Return the sums over the clients at these positions that answered, and what was sent."""
        stage = self.timetable.stage(rng.round)
        steps = self.algorithm if stage is None else stage.steps
        if steps is not self.steps:
            plain = self.task.algorithm if stage is None else stage.phase.steps
            self.steps, self.sample = steps, self.task.sample_answer(plain)
            self.lengths = Lengths(self.sample, steps.answer, self.rules.max_growth)
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
                f"{len(self.answered)} of {len(cohort)} clients answered, {needed} must: attempt "
                f"{self.attempts}",
                round_number=rng.round,
            )
        raise FailedRoundError(
            f"round {rng.round}: too few answers in {self.attempts} attempts: see events.jsonl for "
            "each node's reason, then resume; allow more time (deadline), fewer answers "
            "(min_answers), or lower the learning rate where they are NaN"
        )

    def attempt(
        self, server: Arrays, cohort: Sequence[int], plan: Plan, rng: Randomness
    ) -> tuple[Arrays | None, Traffic]:
        """Try a round once; return the sums over the answers that came, and what was sent."""
        total, traffic, steps = None, Traffic(), self.steps
        self.answered, self.seconds = [], {}
        common = None if steps.each else to_record(steps.broadcast(server, cohort[:1]))
        order = {"plan": dataclasses.asdict(plan), "round": rng.round, "attempt": self.attempts}

        def sent(client: int) -> ArrayRecord:
            if common is not None:
                return common
            return to_record(steps.broadcast(server, [client]))

        for client, reply in self.questions(cohort, sent, order, "train"):
            try:
                answer = self.admit(client, reply, rng.round)
                received = steps.broadcast(server, [client])
                part = self.summarise(received, answer, rng)
                check_finite(part)
                part = labelled(part, client) if isinstance(steps, Defended) else part
            except Refused as refusal:
                self._note_refusal("answer refused", refusal, rng, client)
                continue
            total = add(total, part)
            self.lengths.note(answer)
            self.answered.append(client)
            if steps.sends:
                down, up = received_bytes(steps, received, 1), answer_bytes(steps, answer)
                traffic = Traffic(traffic.down + down, traffic.up + up)
        return total, traffic

    def _note_refusal(self, event: str, why: Exception, rng: Randomness, client: int) -> None:
        about = self.roster.describe(client)
        self.journal.note(event, str(why), round_number=rng.round, **about)

    def admit(self, client: int, reply: Reply, round_number: int) -> Arrays:
        """Return a client's answer after every check."""
        if reply.content is None:
            raise Refused(reply.problem)
        try:
            about = reply.content["about"]
            answer = to_arrays(reply.content["answer"], self.task.settings.place.device)
            stated = {key: about[key] for key in ("client", "round", "attempt", "lost")}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Refused(f"it is not an answer ({error})") from None
        expected = {"client": client, "round": round_number, "attempt": self.attempts}
        if any(stated[key] != value for key, value in expected.items()):
            raise Refused(f"it is the answer of {stated} and not of {expected}")
        check_alike(answer, self.sample)
        check_finite(answer)
        examples, most = self.roster.facts[client].examples, self.task.census.num_examples
        check_values(answer, self.steps.answer, client, examples, most)
        # in private runs no client decides which others count; clipping bounds them all
        if not self.private:
            self.lengths.check(answer)
        for key in ("work_seconds", "process_seconds"):
            value = about.get(key)
            if isinstance(value, float) and math.isfinite(value):
                self.seconds[key] = max(value, self.seconds.get(key, 0.0))
        if stated["lost"]:
            self.journal.note(
                "memory lost",
                "the node no longer has what the client remembered: it started anew",
                round_number=round_number,
                **self.roster.describe(client),
            )
        return answer

    def summarise(self, received: Arrays, answer: Arrays, rng: Randomness) -> Arrays:
        """Return the client's part of the sums.

        Numbers that no client of this algorithm sends may fail anywhere in it.
        """
        try:
            return self.steps.summarise(self.task.problem, received, answer, rng)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise Refused(f"it cannot be summed ({reason(error)})") from None

    def questions(
        self,
        clients: Sequence[int],
        sent: Callable[[int], ArrayRecord],
        order: dict[str, Any],
        kind: str,
    ) -> Iterator[tuple[int, Reply]]:
        """Ask these clients, and yield their answers as they come.

        A client whose node is not connected has an empty answer at once.

        Args:
            clients: their ids.
            sent: makes what is sent to a client, when it is sent.
            order: what the client shall do.
            kind: of the message.
        """
        online, members = self.roster.online(), self.roster.members
        client_of = {
            members[c].node: c for c in clients if c in members and members[c].node in online
        }
        for client in clients:
            if client not in client_of.values():
                yield client, Reply(0, None, "its node is not connected")

        def content(client: int) -> RecordDict:
            counted = {"counted": self.counted.get(client, 0)}
            record = to_config(self.common | counted | order)
            return RecordDict({"received": sent(client), "order": record})

        every = ((node, content(client)) for node, client in client_of.items())
        for reply in ask(
            self.grid, every, kind, str(order["round"]), self.rules.deadline, self.rules.poll
        ):
            yield client_of[reply.node], reply

    def evaluate(self, run: Run, split: str) -> tuple[dict[int, Metrics], dict[int, Metrics]]:
        """Return the metrics of both tasks by client id. The server sees nothing else."""
        census, rng = self.task.census, run.rng
        record = to_record(run.state.server)
        order = {"split": split, "round": rng.round, "attempt": 0}
        everyone = (*census.clients, *census.holdout)
        self.roster.wait(everyone, len(everyone), min(self.rules.patience, STRAGGLERS))
        before: dict[int, Metrics] = {}
        after: dict[int, Metrics] = {}
        names: list[str] = []
        for client, reply in self.questions(everyone, lambda client: record, order, "evaluate"):
            try:
                if reply.content is None:
                    raise Refused(reply.problem)
                if "global" not in reply.content:
                    continue  # the client has no such examples
                names = names or self.metric_names()
                both = [
                    check_metrics(dict(reply.content[task]), names)
                    for task in ("global", "personalised")
                ]
            except (Refused, KeyError, TypeError, ValueError) as refusal:
                self._note_refusal("evaluation refused", refusal, rng, client)
                continue
            before[client], after[client] = both
        return before, after

    def metric_names(self) -> list[str]:
        """Return the metrics of this likelihood, the main one first."""
        likelihood, clients = self.task.problem.likelihood, self.task.census.specimen()
        outputs = torch.zeros(2, likelihood.num_outputs)
        return list(likelihood.metrics(likelihood.predictive(outputs), clients.train.y))

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Add to the record which clients answered, and to the state whose memories count."""
        record["answered"] = sorted(self.answered)
        record["attempts"], record["node_seconds"] = self.attempts, self.seconds
        self.counted |= dict.fromkeys(self.answered, state.done)
        # a private run's model is given away, and its cohorts are secret
        if not self.private:
            state.counted = dict(self.counted)

    def on_phase(self, record: dict[str, Any], state: State) -> None:
        """Do the same for an exchange of a phase."""
        self.on_round(record, state)
