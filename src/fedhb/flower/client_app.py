"""The ClientApp: a node says what it holds, trains, evaluates and personalises. Its data never leave it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhb.algorithms import Arrays, Plan
from fedhb.engine.client_memory import ClientStore
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import global_metrics, personalised_metrics
from fedhb.flower.census import Census, Facts
from fedhb.flower.federated_task import Task, settings_of
from fedhb.flower.node import Node, client_id, load
from fedhb.flower.node_memory import Memory
from fedhb.flower.wire import to_arrays, to_config, to_record
from fedhb.runs.run import one_thread
from fedhb.seeding import Randomness

app = ClientApp()


@app.query()
def census(message: Message, context: Context) -> Message:
    """What this node holds, in numbers that say nothing of a single example."""
    node = load(settings_of(context.run_config), context.node_config)
    return Message(
        RecordDict({"facts": to_config({"facts": Facts.of(node).to_json()})}), reply_to=message
    )


@app.train()
def train(message: Message, context: Context) -> Message:
    """The client's update (Alg. 1, step 3): what it found goes back, what it remembers stays here."""
    work = Work(message, context)
    found = work.found()
    return work.reply({"found": to_record(found)}, work.lost)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The global prediction's metrics on this client's own held-back examples, and those of its personal posterior."""
    work = Work(message, context)
    task, device, split = work.task, work.task.settings.device, str(work.order["split"])
    store, client = ClientStore(), work.node.client.to(device)
    memory, lost = work.memory.at(
        int(work.order["counted"]), task.algorithm, task.problem, work.node.client
    )
    if memory:
        store.put([work.node.id], memory)
        store.commit()
    records: dict[str, Any] = {}
    share = getattr(client, split)
    if share is not None and int(share.sizes[0]):
        server, problem = to_arrays(message.content["received"], device), task.problem
        with one_thread():
            before = global_metrics(problem, task.algorithm, server, client, store, work.rng, split)
            after = personalised_metrics(
                problem, task.algorithm, server, client, store, task.personal_plan, work.rng, split
            )
        records = {"global": MetricRecord(before[0]), "personalised": MetricRecord(after[0])}
    return work.reply(records, lost)


class Work:
    """One message's work: whose, in which round, on which task."""

    def __init__(self, message: Message, context: Context):
        self.begun = time.perf_counter()
        self.message, self.order = message, message.content["order"]
        settings = dataclasses.replace(
            settings_of(context.run_config), device=str(context.node_config.get("device", "cpu"))
        )
        self.node: Node = load(settings, context.node_config)
        self.task = Task.of(settings, Census.read(str(self.order["census"])))
        self.node = dataclasses.replace(self.node, client=dataclasses.replace(
            self.node.client, num_classes=self.task.census.num_classes or None, scaling=self.task.census.input_scaling()
        ))  # fmt: skip
        if self.task.network_digest() != self.order["network"]:
            raise InputError(
                f"client {client_id(context.node_config)} makes another network than the server from the same seed: "
                "install the same versions of torch and fedhb, and the same model code"
            )
        self.lost = False
        self.rng = Randomness(settings.seed, int(self.order["round"]))
        self.memory = Memory(context.state, context.node_config, self.task.job().fingerprint)

    def found(self) -> Arrays:
        """What the client finds in this round; what it remembers of it is kept."""
        task, counted, device = self.task, int(self.order["counted"]), self.task.settings.device
        memory, self.lost = self.memory.at(counted, task.algorithm, task.problem, self.node.client)
        received = to_arrays(self.message.content["received"], device)
        with one_thread():
            found, memory = task.algorithm.local_update(
                task.problem,
                received,
                self.node.client.to(device),
                {key: value.to(device) for key, value in memory.items()},
                Plan(**json.loads(str(self.order["plan"]))),
                self.rng,
            )
        self.memory.put(self.rng.round, counted, memory)
        return found

    def reply(self, records: dict[str, Any], lost: bool) -> Message:
        """The answer, with the client's name on it."""
        about = {
            "client": self.node.id,
            "round": self.rng.round,
            "attempt": self.order["attempt"],
            "lost": lost,
        }
        seconds = {
            "work_seconds": time.perf_counter() - self.begun,
            "process_seconds": process_age(),
        }
        about = to_config(about | seconds)
        return Message(RecordDict({"about": about, **records}), reply_to=self.message)


def process_age() -> float:
    """Seconds since this process began, on Linux: an app's process is made for one message."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
