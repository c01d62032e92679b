"""A small space of settings to tune in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fedhb.runs import tune

SPACE = """
seeds = [100, 101]
trials = 4
draw = 0
[[stages]]
keep = 1.0
cells = ["one"]
[[stages]]
keep = 0.5
cells = ["two"]
[common]
num_clients = 6
shards_per_client = 3
fraction = 0.5
rounds = 2
batch_size = 30
validation = 0.2
model = {hidden = 8}
[cells.one]
dataset = "digits"
[cells.two]
dataset = "digits"
local_epochs = 2
[shared]
lr = [0.01, 0.1]
personal_epochs = [1, 2]
update = ["body", "full"]
[own.niw]
kl_weight = [1e-4, 1e-2]
[own.fedavg]
update = ["full"]
"""


class Silent:
    def __init__(self):
        self.made = []

    def begin(self, todo):
        pass

    def tell(self, job, share, text):
        pass

    def recorded(self, record):
        self.made.append(record)


def write(folder: Path, text: str = SPACE) -> Path:
    path = folder / "tuning" / "space.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run(path: Path, methods: Any = None) -> tuple[list[tune.Tuned], list[dict[str, Any]]]:
    space, watcher = tune.Space.read(path), Silent()
    return tune.tune(space, methods or space.methods, 1, watcher), watcher.made


OWN = """
seeds = [100]
trials = 3
[common]
data = "mine.npz"
rounds = 2
fraction = 0.5
validation = 0.2
model = {hidden = 8}
[cells.all]
[[stages]]
keep = 1.0
cells = ["all"]
[shared]
lr = [0.001, 0.03]
personal_epochs = [1, 5]
[own.empirical-bayes]
[own.fedavg]
"""


def write_data(seed=0, real=False):
    rng = np.random.default_rng(seed)
    x, client = rng.normal(size=(200, 3)), np.repeat(["a", "b", "c", "d"], 50)
    y = x.sum(1) + 0.1 * rng.normal(size=200)
    np.savez("mine.npz", x=x, y=y if real else (y > 0).astype(int), client=client)
    os.utime("mine.npz", (seed, seed))  # clocks tick slowly
