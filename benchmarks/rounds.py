"""What a round costs: every algorithm on the same work, alternating in one run, as ratios to FedBABU.

The work: 100 clients with 600 examples of 784 features, 10 clients in a round, an MLP 784-256-10, batches of 50, one local epoch.
One thread in one process, so processor time is what a round costs, whatever else the machine does. The median over the
repeats, and the quartiles of the ratio.

    python benchmarks/rounds.py [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from fedhb import nets
from fedhb.algorithms import ALGORITHMS, Federation, Plan, Problem, build
from fedhb.clients import Clients
from fedhb.engine.executor import InProcess
from fedhb.engine.loop import State, Training, one_round
from fedhb.likelihood import Categorical
from fedhb.network import Network
from fedhb.seeding import Randomness


def make_clients(num_clients: int = 100, size: int = 600, features: int = 784) -> Clients:
    """Random bytes with random labels: the cost of a round does not depend on what is in the images."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256, (size, features), dtype=np.uint8), rng.integers(0, 10, size)) for _ in range(num_clients)]
    return Clients.from_arrays(pairs, num_classes=10, standardise=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clients = make_clients()
    # tempered so that every method trains on comparable numbers; the cost does not depend on it
    options = {"niw": {"kl_weight": 1e-4, "lambda0": 0.0}}
    runs = {}
    for name in ALGORITHMS:
        torch.manual_seed(0)
        network = Network(nets.mlp((784,), 10), scaling=clients.scaling)
        problem = Problem(network, Categorical(10), Federation(len(clients), clients.num_examples, 10))
        algorithm = build(name, options.get(name))
        state = State(server=algorithm.start(problem, Randomness(0)))
        training = Training(10**6, 0.1, Plan(1, 50, 0.1, 0.9, algorithm.update == "full"), "constant", 0)
        runs[name] = (problem, algorithm, training, state, InProcess(problem, algorithm, clients, state.store))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(arguments.repeats + 1):
        for name, (problem, algorithm, training, state, executor) in runs.items():
            for timed in (False, True):  # the first round after another algorithm's fills the caches anew, as no run does
                begun = time.process_time()
                one_round(problem, algorithm, len(clients), training, state, executor)
                if timed and repeat:
                    seconds[name].append(time.process_time() - begun)
    table = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["fedbabu"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[name] = {"seconds": statistics.median(times), "ratio": middle, "quartiles": [low, high]}
    print(f"{'algorithm':10} {'seconds':>8} {'ratio to FedBABU':>17}  quartiles")
    for name, row in table.items():
        low, high = row["quartiles"]
        print(f"{name:10} {row['seconds']:8.4f} {row['ratio']:17.2f}  {low:.2f} .. {high:.2f}")
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
