"""A client belongs to the key of the node that first was it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from loopback import FIRST, Loopback, config, small
from loopback_faults import events

from fedhb.flower.server_app import serve


def test_another_key_cannot_take_a_clients_place(tmp_path):
    settings = small("niw", rounds=1, fraction=1.0)
    chosen = config(settings, tmp_path / "out")
    grid = Loopback([{"partition-id": k} for k in (0, 1, 2, 3, 2)], chosen)
    run = serve(grid, chosen)
    assert run.records[0]["answered"] == [0, 1, 2, 3]
    (event,) = events(tmp_path / "out")
    assert (
        event["event"] == "node refused"
        and event["node"] == FIRST + 4
        and "another key" in event["detail"]
    )
