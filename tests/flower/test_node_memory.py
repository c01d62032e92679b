"""The memory of a client lies on its node, and may be lost."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr")

from loopback import FIRST, Loopback, config, federation, small
from loopback_faults import events

from fedhb.flower.server_app import serve
from fedhb.runs.from_settings import train


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program may catch it and go on."""


def stopped_in_round(grid, chosen, number):
    """A federation whose server is killed when it asks for this round."""
    push = grid.push_messages

    def pushed(messages):
        order = messages[0].content.get("order")
        if order is not None and order["round"] == number:
            raise Killed
        return push(messages)

    grid.push_messages = pushed
    with pytest.raises(Killed):
        serve(grid, chosen)
    grid.push_messages = push


def test_memories_outlive_the_records_of_the_rounds(tmp_path):
    """rounds.jsonl may be deleted, as the error of a damaged one says: clients go on with what they
    remember.
    """
    settings = small("fedpop", rounds=3, fraction=1.0, max_examples=10)
    clean = serve(*federation(settings, tmp_path / "clean"))
    grid, chosen = federation(settings, tmp_path / "out")
    stopped_in_round(grid, chosen, 3)
    (tmp_path / "out" / "rounds.jsonl").unlink()
    with pytest.warns(UserWarning, match="rounds 1 to 2"):
        run = serve(grid, chosen | {"resume": True})
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())
    assert run.result["personalised"] == clean.result["personalised"]
    asked = [m.content["order"] for m in grid.sent if m.metadata.message_type == "train"]
    assert [order["counted"] for order in asked if order["round"] == 3] == [2] * 4


def test_what_a_client_remembers_counts_only_where_its_answer_did(tmp_path):
    """A late or refused answer's memory is forgotten: the end is that of a run in which the round
    went well.
    """
    settings = small("local", rounds=3, fraction=1.0)
    clean = serve(*federation(settings, tmp_path / "clean"))

    def fault(client, message, reply):
        order = message.content["order"] if "received" in message.content else {}
        return (
            [] if client != 0 and (order.get("round"), order.get("attempt")) == (2, 1) else [reply]
        )

    grid, chosen = federation(settings, tmp_path / "out", deadline=0.3)
    grid.fault = fault
    run = serve(grid, chosen)
    assert run.records[1]["attempts"] == 2
    assert run.result["personalised"] == clean.result["personalised"]
    assert "memory lost" not in {e["event"] for e in events(tmp_path / "out")}
    simulated = train(settings, tmp_path / "simulated", progress=False)
    assert run.result["personalised"] == pytest.approx(simulated.result["personalised"], abs=2e-2)


def test_a_node_that_lost_its_memory_begins_anew_and_the_server_is_told(tmp_path):
    grid, chosen = federation(small("local", rounds=2, fraction=1.0), tmp_path / "out")

    def fault(client, message, reply):
        if client == 1 and "received" in message.content and message.content["order"]["round"] == 1:
            grid.contexts[FIRST + 1].state.clear()
        return [reply]

    grid.fault = fault
    serve(grid, chosen)
    told = [e for e in events(tmp_path / "out") if e["event"] == "memory lost"]
    assert [(e["client"], e["round"]) for e in told] == [(1, 2)]


def test_memory_on_disk_outlives_the_node(tmp_path):
    """With `keep`, a node that is started again and a run that is resumed find what their client
    remembered.
    """
    settings = small("local", rounds=3, fraction=1.0)
    clean = serve(*federation(settings, tmp_path / "clean"))
    chosen = config(settings, tmp_path / "out")
    grid = Loopback(
        [{"partition-id": k, "keep": str(tmp_path / f"keep{k}")} for k in range(4)], chosen
    )

    def fault(client, message, reply):
        grid.contexts[FIRST + client].state.clear()
        return [reply]

    grid.fault = fault
    run = serve(grid, chosen)
    assert run.result["personalised"] == clean.result["personalised"] and not events(
        tmp_path / "out"
    )
    assert all(len(list((tmp_path / f"keep{k}").rglob("*.safetensors"))) == 2 for k in range(4))


def test_a_damaged_memory_on_disk_counts_as_lost(tmp_path):
    """The client begins anew and says so, as where the file is not there; its node goes on."""
    chosen = config(small("local", rounds=2, fraction=1.0), tmp_path / "out")
    grid = Loopback(
        [{"partition-id": k, "keep": str(tmp_path / f"keep{k}")} for k in range(4)], chosen
    )

    def fault(client, message, reply):
        grid.contexts[FIRST + client].state.clear()
        if client == 1 and "received" in message.content and message.content["order"]["round"] == 1:
            for path in (tmp_path / "keep1").rglob("*.safetensors"):
                path.write_bytes(path.read_bytes()[:-5])
        return [reply]

    grid.fault = fault
    run = serve(grid, chosen)
    assert run.result["rounds"] == 2
    assert [
        (e["client"], e["round"]) for e in events(tmp_path / "out") if e["event"] == "memory lost"
    ] == [(1, 2)]
