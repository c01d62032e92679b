"""A short run of `fedhb.fit` on the clients of builders.py, and what tests do with its folder."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from builders import CLASSES, FEATURES, clients, mlp

import fedhb
from fedhb.clients.clients import Clients
from fedhb.files import sealed
from fedhb.runs.simulation import Model

module = importlib.import_module("fedhb.runs.fit")

X = np.random.default_rng(7).normal(size=(9, FEATURES))


def fit(
    model: Any = None, who: Any = None, algorithm: Any = None, again: Any = None, **options: Any
) -> Any:
    """A short run; `again` says how its network is made again, as for one of fedhb's own."""
    chosen: dict[str, Any] = {
        "rounds": 3,
        "fraction": 0.5,
        "batch_size": 4,
        "personal_epochs": 2,
        "progress": False,
    } | options
    model = mlp(torch.float32) if model is None else model
    with mock.patch.object(module, "Model", partial(Model, again=again)):
        return fedhb.fit(model, clients() if who is None else who, algorithm, **chosen)


def rewritten(folder: Path, change: Any) -> None:
    """problem.json with some of it changed, and sealed again."""
    record = json.loads((folder / "problem.json").read_text())
    record.pop("checksum")
    change(record)
    (folder / "problem.json").write_bytes(sealed(record))


def images() -> tuple[Clients, Clients]:
    """Four clients with small images that are cropped and flipped in training, and a novel one."""
    rng = np.random.default_rng(0)
    train, test = (
        [(rng.normal(size=(n, 1, 8, 8)), rng.integers(0, CLASSES, n)) for _ in range(5)]
        for n in (12, 9)
    )
    who = Clients.from_arrays(train, test, num_classes=CLASSES)
    return replace(who, augment="crop-flip").hold_out(1, seed=0)
