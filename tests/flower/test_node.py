"""The data of a node: a partition, its owner's file, or what a function returns."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from loopback import FIRST, Loopback, close, config, federation, own_files, small

from fedhb.errors import InputError
from fedhb.flower.server_app import serve
from fedhb.runs.from_settings import train


@pytest.mark.parametrize("regression", [0, 1, 3])
def test_nodes_with_their_own_files_agree_by_sums_alone(tmp_path, regression):
    """Scaling, classes and the units of the targets come from moments; the numbers are those of one
    pooled file.
    """
    own_files(tmp_path, regression)
    settings = small("niw", data=str(tmp_path / "all.npz"))
    simulated = train(settings, tmp_path / "simulated", progress=False)
    chosen = config(replace(settings, data=""), tmp_path / "flower")
    grid = Loopback(
        [{"partition-id": k, "data": str(tmp_path / f"{k}.npz")} for k in range(4)], chosen
    )
    run = serve(grid, chosen)
    close(run.state.server, simulated.state.server, "own files")
    scaling, theirs = run.problem.network.scaling, simulated.problem.network.scaling
    torch.testing.assert_close(scaling.mean, theirs.mean)
    torch.testing.assert_close(scaling.std, theirs.std)
    assert run.result["global"] == pytest.approx(simulated.result["global"], rel=1e-3, abs=2e-2)
    missing = [[value is None for value in r.result["per_client"][f"global_{'rmse' if regression else 'accuracy'}"]]
               for r in (run, simulated)]  # fmt: skip
    assert missing == [[False, False, True, False]] * 2
    if regression:
        ours, others = (r.problem.likelihood for r in (run, simulated))
        assert (
            isinstance(ours.scale, float if regression == 1 else tuple)
            and ours.num_targets == others.num_targets
        )
        for key in ("centre", "scale"):
            assert np.ravel(getattr(ours, key)) == pytest.approx(
                np.ravel(getattr(others, key)), rel=1e-12
            )


def test_a_file_that_nodes_share_is_partitioned(tmp_path):
    own_files(tmp_path, 0)
    settings = small("fedavg", data=str(tmp_path / "all.npz"))
    simulated = train(settings, tmp_path / "simulated", progress=False)
    chosen = config(settings, tmp_path / "flower")
    grid = Loopback(
        [{"partition-id": k, "shared": str(tmp_path / "all.npz")} for k in range(4)], chosen
    )
    close(serve(grid, chosen).state.server, simulated.state.server, "shared file")


def test_data_from_a_function_without_test_examples(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "owners.py").write_text("from loopback import patients\n")
    chosen = config(small("mixture"), tmp_path / "out")
    run = serve(
        Loopback([{"partition-id": k, "data": "owners:patients"} for k in range(4)], chosen), chosen
    )
    assert run.result["global"] is None and run.result["split"] is None
    assert run.problem.federation.num_examples == 80 and run.problem.federation.num_classes == 2


def test_the_run_cannot_choose_a_nodes_file(tmp_path):
    own_files(tmp_path, 0)
    grid, chosen = federation(
        small("niw", data=str(tmp_path / "all.npz")), tmp_path / "out", patience=0.05
    )
    with pytest.raises(InputError, match="0 of 4 nodes"):
        serve(grid, chosen)
    events = [
        json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    ]
    assert {e["node"] for e in events} == set(range(FIRST, FIRST + 4))
    assert "node's" in events[0]["detail"]
