"""Runs of the command line to compare, and their methods."""

from __future__ import annotations

import finished
import numpy as np
import torch

import fedhb
from fedhb.report import run_data
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings


def table(path, seed):
    """A file of four clients' own."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        x=rng.normal(size=(160, 3)).astype(np.float32),
        y=rng.integers(0, 2, 160),
        client=np.repeat([*"abcd"], 40),
    )
    return path


def own(file, out, seed=0):
    """A run on it."""
    flags = {"algorithm": "fedavg", "data": str(file), "rounds": 1, "seed": seed}
    train(
        Settings.resolve(finished.SMALL | {"model": {"name": "mlp", "hidden": 4}}, flags),
        out,
        progress=False,
    )
    return out


def fitted(out, hidden, seed, examples=20, evaluate_on="test"):
    """A run from Python, whose settings tell of arrays and a class alone."""
    rng = np.random.default_rng(0)
    shares = [
        (rng.normal(size=(examples, 3)).astype(np.float32), rng.integers(0, 2, examples))
        for _ in range(3)
    ]
    model = torch.nn.Sequential(
        torch.nn.Linear(3, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)
    )
    clients = fedhb.Clients.from_arrays(shares, shares)
    fedhb.fit(
        model,
        clients,
        fedhb.FedAvg(),
        rounds=1,
        seed=seed,
        out=out,
        progress=False,
        workers=1,
        evaluate_on=evaluate_on,
    )
    return out


def names(*paths):
    return [method.name for method in run_data.read(paths)]
