"""The ClientApp: a node says what it holds, trains and evaluates. Its data never leave it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhb.algorithms import Arrays, Plan
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.loop import State
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import Evaluation
from fedhb.flower.census import Census, Facts
from fedhb.flower.federated_task import FederatedTask, settings_of
from fedhb.flower.node import Node, client_id, load
from fedhb.flower.node_memory import Memory
from fedhb.flower.wire import to_arrays, to_config, to_record
from fedhb.runs.run import one_thread
from fedhb.seeding import Randomness

app = ClientApp()


@app.query()
def census(message: Message, context: Context) -> Message:
    """Answer what this node holds, in numbers that say nothing of a single example."""
    node = load(settings_of(context.run_config), context.node_config)
    facts = to_config({"facts": Facts.of(node).to_json()})
    return Message(RecordDict({"facts": facts}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the client's update (Alg. 1, step 3): its answer goes back, its memory stays here."""
    work = NodeWork(message, context)
    answer = work.answer()
    return work.reply({"answer": to_record(answer)})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer the metrics of both tasks on this client's own held-back examples."""
    work = NodeWork(message, context)
    records: dict[str, Any] = {}
    split = str(work.order["split"])
    share = getattr(work.client, split)
    if share is not None and int(share.sizes[0]):
        evaluation = work.evaluation(split)
        with one_thread():
            before = evaluation.global_metrics(work.client)
            after = evaluation.personalised_metrics(work.client)
        records = {"global": MetricRecord(before[0]), "personalised": MetricRecord(after[0])}
    return work.reply(records)


class NodeWork:
    """The work that one message asks for: the client, the round, the task."""

    def __init__(self, message: Message, context: Context):
        self.started = time.perf_counter()
        self.message, self.order = message, message.content["order"]
        self.device = str(context.node_config.get("device", "cpu"))
        settings = settings_of(context.run_config).change(device=self.device)
        node: Node = load(settings, context.node_config)
        self.task = FederatedTask.of(settings, Census.read(str(self.order["census"])))
        census, shared = self.task.census, self.task.shared_hash()
        if shared != self.order["task"]:
            raise InputError(
                f"client {client_id(context.node_config)} makes another network than the server "
                "from the same seed: install the same versions of torch and fedhb, and the same "
                "model code"
            )
        client = replace(
            node.client, num_classes=census.num_classes or None, scaling=census.input_scaling()
        )
        self.id, self.client = node.id, client.to(self.device)
        self.rng = Randomness(settings.seed, int(self.order["round"]))
        self.memories = Memory(context.state, context.node_config, shared)
        self.memory, self.lost = self.memories.at(
            int(self.order["counted"]), self.task.algorithm, self.task.problem, client
        )

    @property
    def received(self) -> Arrays:
        """The arrays that the server sent."""
        return to_arrays(self.message.content["received"], self.device)

    def answer(self) -> Arrays:
        """Return the client's answer in this round; keep what it remembers of the round."""
        with one_thread():
            answer, memory = self.task.steps(self.rng.round).local_update(
                self.task.problem,
                self.received,
                self.client,
                {key: value.to(self.device) for key, value in self.memory.items()},
                Plan(**json.loads(str(self.order["plan"]))),
                self.rng,
            )
        self.memories.put(self.rng.round, int(self.order["counted"]), memory)
        return answer

    def evaluation(self, split: str) -> Evaluation:
        """Return the evaluation of the server's arrays with this client's memory."""
        store = ClientStore()
        if self.memory:
            store.put([self.id], self.memory)
            store.commit()
        task, state = self.task, State(self.received, store=store)
        plan = task.settings.personal_plan
        return Evaluation(task.problem, task.algorithm, state, plan, self.rng, split)

    def reply(self, records: dict[str, Any]) -> Message:
        """Return the message with these records and the client's name on it."""
        about = {
            "client": self.id,
            "round": self.rng.round,
            "attempt": self.order["attempt"],
            "lost": self.lost,
            "work_seconds": time.perf_counter() - self.started,
            "process_seconds": process_age(),
        }
        return Message(RecordDict({"about": to_config(about), **records}), reply_to=self.message)


def process_age() -> float:
    """Return the seconds since this process started (Linux; 0 elsewhere).

    Flower starts a process for each message.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
