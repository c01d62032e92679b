"""Small runs on the embedded digits for tests of what is made from runs."""

from __future__ import annotations

from pathlib import Path

from fedhb.experiment import compare, train
from fedhb.settings import Settings

SMALL = {
    "num_clients": 8,
    "shards_per_client": 3,
    "fraction": 0.5,
    "rounds": 6,
    "batch_size": 20,
    "personal_epochs": 1,
    "workers": 1,
}


def one(path: Path, algorithm: str, **more: object) -> Path:
    """One run."""
    train(
        Settings.resolve(SMALL | more | {"model": {"name": "mlp", "hidden": 16}}, {"algorithm": algorithm}), path, progress=False
    )
    return path


def several(path: Path, algorithms: tuple[str, ...] = ("niw", "mixture", "fedavg"), seeds: tuple[int, ...] = (0, 1)) -> Path:
    """A comparison."""
    content = SMALL | {"model": {"name": "mlp", "hidden": 16}}
    compare({name: Settings.resolve(content, {"algorithm": name}) for name in algorithms}, seeds, path)
    return path
