"""Checkpoints: their order, the files that are kept, arrays of every kind."""

from __future__ import annotations

import json
import numpy as np
import torch
from builders import same_bits
from fedhb.engine.loop import State
from fedhb.runs import checkpoint
from stopped_runs import fit


def test_checkpoints_are_in_the_order_of_their_rounds(tmp_path):
    """By number: as text, round 1,000,000 comes before round 999,999, and the newest would be
    removed as the oldest.
    """
    for done in range(999_998, 1_000_002):
        checkpoint.save(
            tmp_path,
            State({"theta": torch.full((2,), float(done))}, done=done),
            {"theta": torch.zeros(2)},
            "f" * 64,
        )
    assert {path.name for path in tmp_path.glob("round-*.json")} == {
        "round-1000000.json",
        "round-1000001.json",
    }
    state, _ = checkpoint.load(tmp_path)
    assert state.done == 1_000_001 and state.server["theta"][0] == 1_000_001


def test_files_no_longer_needed_are_removed(tmp_path):
    out = tmp_path / "run"
    fit(out, checkpoint_every=1)
    names = {
        p.relative_to(out / "checkpoint").as_posix()
        for p in (out / "checkpoint").rglob("*")
        if p.is_file()
    }
    kept = {"round-000005", "round-000006"}
    assert {n for n in names if n.endswith(".json")} == {f"{n}.json" for n in kept} | {
        "result.json"
    }
    needed = set()
    for name in kept:
        needed |= json.loads((out / "checkpoint" / f"{name}.json").read_text())["sha256"].keys()
    assert names - {f"{n}.json" for n in kept} - {"result.json"} == needed
    assert sum(n.startswith("constants-") for n in names) == 1
    # clients that did not take part in the last rounds keep the file of their own last round
    assert len({n[-18:] for n in names if n.startswith("memory/")}) > 2


def test_arrays_of_every_kind_survive(tmp_path):
    arrays = {
        "view": torch.arange(12, dtype=torch.float64).view(3, 4).T,
        "expanded": torch.ones(1).expand(5),
        "half": torch.arange(6, dtype=torch.float16)[::2],
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
    }
    digest = checkpoint.write_arrays(tmp_path / "arrays.safetensors", arrays)
    assert same_bits(checkpoint._read_checked(tmp_path / "arrays.safetensors", digest), arrays)
    shared = torch.arange(4.0)
    digest = checkpoint.write_arrays(
        tmp_path / "shared.safetensors", {"a": shared, "b": shared[1:]}
    )
    found = checkpoint._read_checked(tmp_path / "shared.safetensors", digest)
    np.testing.assert_array_equal(found["b"], [1, 2, 3])
