"""Flower as a contender: its simulation on Ray.

It has the FedAvg strategy and a client as Flower's documents write one, one actor for each core,
and one torch thread in each actor. A client keeps its examples in the actor's memory, which spares
Flower the loading. The simulation is in a process of its own and runs one round (`strategy.start`)
for each request, so that it takes turns with the other contenders; its start-up is measured apart.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedhb.engine.cohort import cores
from fedhb.processes import start
from fedhb_paper.bench.bench_task import Task

EXTRA = "bench-peers"


def missing() -> str | None:
    """Return why Flower is left out, or None where it is installed."""
    absent = [name for name in ("flwr", "ray") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"flower left out: {' and '.join(absent)} not installed "
        f"(pip install 'fedhb-paper[{EXTRA}]')"
    )


class Flower:
    """FedAvg by Flower's simulation.

    `startup` has the seconds from a fresh interpreter to the end of the first round.
    """

    def __init__(self, task: Task):
        started = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        # Ray does not survive a fork
        self._child = start("spawn", _simulate, task, cores(), self._folder.name)
        try:
            self()
        except RuntimeError:
            self.close()
            raise
        self.startup = time.perf_counter() - started

    def __call__(self) -> None:
        """Run one round."""
        self._ask("round")

    def weights(self) -> dict[str, Any]:
        """Return the global network by the names of its tensors, as arrays."""
        return self._ask("weights")

    def _ask(self, request: str) -> Any:
        try:
            self._child.pipe.send(request)
            return self._child.pipe.recv()
        except (EOFError, OSError):
            end = self._log.read_text()[-2000:]
            raise RuntimeError(f"Flower's simulation ended; the end of its log:\n{end}") from None

    def close(self) -> None:
        """End the simulation."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._child.pipe.send("stop")
        self._child.stop(patience=60.0)
        self._folder.cleanup()


def _simulate(pipe: Connection, task: Task, actors: int, folder: str) -> None:
    """Run the simulation until it is told to stop. Its prints and its files go to the folder."""
    with Path(folder, "log").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= {
        "FLWR_HOME": folder,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as the other contenders: by default Ray's workers yield
    }
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(task.ordinary().state_dict())
        strategy = FedAvg(
            fraction_train=task.fraction, fraction_evaluate=0.0, min_train_nodes=task.per_round
        )
        done = 0
        while (request := pipe.recv()) != "stop":
            if request == "round":
                done += 1
                config = ConfigRecord({"turn": done})
                arrays = strategy.start(
                    grid=grid, initial_arrays=arrays, num_rounds=1, train_config=config
                ).arrays
            pipe.send(
                {name: array.numpy() for name, array in arrays.items()}
                if request == "weights"
                else None
            )

    run_simulation(
        server_app=server,
        client_app=_client_app(task),
        num_supernodes=task.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": actors, "include_dashboard": False, "_temp_dir": folder},
        },
    )


def _client_app(task: Task) -> Any:
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedhb_paper.bench.peers import train

    app = ClientApp()

    @app.train()
    def train_client(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = task.ordinary()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client = int(context.node_config["partition-id"])
        x, y = _examples(task, client)
        train(model, x, y, task.order(message.content["config"]["turn"], client), task)
        metrics = MetricRecord({"num-examples": task.examples})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


@functools.cache
def _examples(task: Task, client: int) -> tuple[Any, Any]:
    import torch

    x, y = task.examples_of(client)
    return torch.from_numpy(x), torch.from_numpy(y)
