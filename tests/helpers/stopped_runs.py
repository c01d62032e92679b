"""A small run whose clients remember, so that every kind of file is there, and what it must come
to.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import clients, mlp, same_bits

import fedhb

fork = multiprocessing.get_context("fork")


class After:
    """Does something after each round."""

    def __init__(self, action: Callable[[int], Any]):
        self.action = action

    def on_start(self, done: int, rounds: int) -> None:
        pass

    def on_round(self, record: dict[str, Any], state: Any) -> None:
        self.action(state.done)

    def on_end(self) -> None:
        pass


def fit(out: Path | None, after: Callable[[int], Any] = lambda done: None, **options: Any) -> Any:
    """The run; it goes on where it was stopped."""
    chosen = {"rounds": 6, "fraction": 0.5, "batch_size": 4, "seed": 3, "checkpoint_every": 2}
    chosen |= {"evaluate_on": None, "progress": False}
    chosen |= {
        "model": mlp(torch.float32),
        "clients": clients(),
        "algorithm": fedhb.NIW(begin="last"),
        "resume": True,
    }
    chosen |= {"callbacks": [After(after)]}
    return fedhb.fit(out=out, **(chosen | options))


def memories(run: Any) -> dict[str, torch.Tensor]:
    found = {
        f"{i}.{key}": value
        for i, memory in run.state.store.memories.items()
        for key, value in memory.items()
    }
    return dict(sorted(found.items()))


def assert_same(run: Any, whole: Any, out: Path) -> None:
    """To the last bit, each round once, and the folder holds nothing that is half written."""
    assert same_bits(run.state.server, whole.state.server) and same_bits(
        memories(run), memories(whole)
    )
    assert (
        run.state.traffic == whole.state.traffic
        and run.state.client_rounds == whole.state.client_rounds
    )
    kept = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    ours = [{k: v for k, v in record.items() if k != "seconds"} for record in kept]
    assert ours == [{k: v for k, v in record.items() if k != "seconds"} for record in whole.records]
    loaded = fedhb.load(out, model=mlp(torch.float32))
    assert same_bits(loaded.state.server, whole.state.server) and same_bits(
        memories(loaded), memories(whole)
    )
    assert not list((out / "checkpoint").rglob("*.tmp"))


def stopped(out: Path, at: int = 5, **options: Any) -> Path:
    """A run that was interrupted: its folder holds the checkpoints of rounds 4 and 5."""

    def interrupt(done: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(out, interrupt, **options)
    return out
