"""Small runs on the embedded digits for tests of what is made from runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedhb.runs.comparison import compare
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings

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
        Settings.resolve(
            SMALL | more | {"model": {"name": "mlp", "hidden": 16}}, {"algorithm": algorithm}
        ),
        path,
        progress=False,
    )
    return path


def regression(path: Path) -> Path:
    """A run on real targets, its clients with names that the data give."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3)).astype(np.float32)
    who = np.repeat([f"site {k}" for k in range(6)], 40)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path.parent / "sites.npz",
        x=x,
        y=x @ [1.0, 2.0, -1.0] + 0.3 * rng.normal(size=240),
        client=who,
    )
    flags = {"algorithm": "niw", "data": str(path.parent / "sites.npz")}
    train(Settings.resolve(SMALL, flags), path, progress=False)
    return path


def several(
    path: Path,
    algorithms: tuple[str, ...] = ("niw", "mixture", "fedavg"),
    seeds: tuple[int, ...] = (0, 1),
) -> Path:
    """A comparison."""
    content = SMALL | {"model": {"name": "mlp", "hidden": 16}}
    compare(
        {name: Settings.resolve(content, {"algorithm": name}) for name in algorithms}, seeds, path
    )
    return path
