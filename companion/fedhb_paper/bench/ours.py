"""fedhb as a contender: rounds of its own loop, on the executor that a user would get."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.algorithms import build
from fedhb.clients.clients import Clients
from fedhb.engine.automatic import Automatic
from fedhb.engine.in_process import InProcess
from fedhb.engine.loop import State, Training, one_exchange
from fedhb.engine.timetable import Stage, Timetable
from fedhb.seeding import Randomness
from fedhb_paper.bench.bench_task import SEED, Task


class Ours:
    """One algorithm of fedhb at work on a task.

    With `alone` it works in this process on one thread, however many cores the machine has.
    """

    def __init__(self, name: str, task: Task, clients: Clients, alone: bool = False):
        self.draw, self.problem, self.algorithm = task.cohort, task.problem(clients), build(name)
        self.state = State(server=self.algorithm.start(self.problem, Randomness(SEED)))
        self.training = Training(
            10**6, task.fraction, task.plan(self.algorithm.update), "constant", SEED
        )
        parts = self.problem, self.algorithm, clients, self.state.store
        self.executor = InProcess(*parts) if alone else Automatic(*parts, training=self.training)

    def __call__(self) -> None:
        """Run one round."""
        torch.set_num_threads(1)  # as `fit` does
        stage = Stage.of_round(self.algorithm, self.draw)
        timetable = Timetable(self.training.rounds)
        one_exchange(self.problem, stage, self.training, self.state, self.executor, timetable)

    def weights(self) -> dict[str, Tensor]:
        """Return the server's network by the names of its tensors, where it keeps one."""
        network, server = self.problem.network, self.state.server
        weights = {slot.name: slot.of(server["theta"]) for slot in network.body_slots}
        if "head" in server:
            weights |= {slot.name: slot.of(server["head"]) for slot in network.head_slots}
        if "buffers" in server:
            weights |= {slot.name: slot.of(server["buffers"]) for slot in network.buffer_slots}
        return weights

    def close(self) -> None:
        """Stop its workers."""
        self.executor.close()
