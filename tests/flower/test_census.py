"""The census: the clients that are there, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from loopback import Loopback, config, own_files, small

from fedhb.errors import InputError
from fedhb.flower.census import Census, Facts, Moments
from fedhb.flower.federated_task import Task
from fedhb.flower.node import load as load_node
from fedhb.flower.server_app import serve
from fedhb.likelihood import CALM, GaussianRegression


def test_the_moments_of_every_target_are_needed(tmp_path):
    own_files(tmp_path, 3)
    facts = Facts.of(load_node(small("niw"), {"partition-id": 0, "data": str(tmp_path / "0.npz")}))
    census = Census.of([Facts.read(facts.to_json())])
    assert (
        Census.read(census.to_json()) == census
        and len(census.targets[0]) == len(census.targets[1]) == 3
    )
    few = replace(
        facts,
        targets=Moments(facts.targets.count, facts.targets.mean[:1], facts.targets.scatter[:1]),
    )
    with pytest.raises(ValueError, match=r"1 of 3 targets.*version"):
        Facts.read(few.to_json())


def test_a_federation_with_one_scale_for_all_targets_is_resumed_with_it(tmp_path):
    """As census.json had it once: the same text, so the same fingerprint, and the same likelihood."""
    own_files(tmp_path, 3)
    facts = Facts.of(load_node(small("niw"), {"partition-id": 0, "data": str(tmp_path / "0.npz")}))
    old = replace(Census.of([facts]), targets=(2.0, 5.0))
    assert Census.read(old.to_json()).to_json() == old.to_json()
    likelihood = Task.of(small("niw"), Census.read(old.to_json())).problem.likelihood
    assert likelihood == GaussianRegression(3, centre=2.0, scale=5.0, **CALM)


def test_nodes_that_do_not_fit_together_are_named(tmp_path):
    own_files(tmp_path, 0)
    np.savez(tmp_path / "odd.npz", x=np.zeros((9, 7), np.float32), y=np.arange(9) % 3)
    chosen = config(small("niw"), tmp_path / "out")
    files = ["0.npz", "1.npz", "2.npz", "odd.npz"]
    grid = Loopback(
        [{"partition-id": k, "data": str(tmp_path / f)} for k, f in enumerate(files)], chosen
    )
    with pytest.raises(InputError, match=r"client 0 .*input_shape=\(5,\).*client 3 .*\(7,\)"):
        serve(grid, chosen)
