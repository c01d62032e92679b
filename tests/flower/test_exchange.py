"""Answers that come twice, under another name or in pieces."""

from __future__ import annotations

import hashlib

import pytest
import torch

pytest.importorskip("flwr")

import httpx
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    validate_object_content,
)
from loopback import FIRST, federation, small
from loopback_faults import events

from fedhb.flower.server_app import serve


def test_an_answer_that_comes_twice_counts_once(tmp_path):
    settings = small("niw", rounds=2, fraction=1.0)
    clean = serve(*federation(settings, tmp_path / "clean"))
    grid, chosen = federation(settings, tmp_path / "out")
    grid.fault = lambda client, message, reply: (
        [reply, reply] if client == 1 and "received" in message.content else [reply]
    )
    run = serve(grid, chosen)
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())
    told = [e for e in events(tmp_path / "out") if "twice" in e["detail"]]
    assert {e["client"] for e in told} == {1} and {e["round"] for e in told} == {1, 2, 3}


def test_an_answer_under_another_name_is_refused(tmp_path):
    def fault(client, message, reply):
        if client == 3 and reply.has_content() and "found" in reply.content:
            reply.content["about"]["client"] = 0
        return [reply]

    grid, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "out")
    grid.fault = fault
    assert serve(grid, chosen).records[0]["answered"] == [0, 1, 2]
    assert "answer of" in events(tmp_path / "out")[0]["detail"]


def undecodable(kind: str):
    """Do as Flower does where a node uploads bytes that are not what their head says."""
    if kind == "another object":
        return inflated("ArrayChunk", b"no message at all")
    if kind == "deep":
        raise RecursionError("maximum recursion depth exceeded")
    return inflated(*{"record": ("ConfigRecord", b"\xff\xff\xffgarbage"), "arrays": ("ArrayRecord", b'{"m": "nowhere"}'),
                      "json": ("RecordDict", b"{"), "array": ("Array", b"[]")}[kind])  # fmt: skip


def inflated(kind: str, body: bytes):
    content = f"{kind}  {len(body)}".encode() + b"\x00" + body
    validate_object_content(content)  # so the SuperLink would keep it
    name = hashlib.sha256(content).hexdigest()
    found = inflate_object_from_contents(name, {name: content})
    found.metadata.__dict__["_message_id"] = name  # as Flower's grid goes on
    return found


@pytest.mark.parametrize("kind", ["record", "arrays", "json", "array", "another object", "deep"])
def test_an_answer_that_cannot_be_decoded_is_one_nodes_alone(tmp_path, kind):
    grid, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "out")
    pull = grid.pull_messages

    def pulled(numbers):
        found = pull(numbers)
        if any(
            m.metadata.src_node_id == FIRST + 2 and m.metadata.message_type == "train"
            for m in found
        ):
            undecodable(kind)
        return found

    grid.pull_messages = pulled
    assert serve(grid, chosen).records[0]["answered"] == [0, 1, 3]
    (event,) = events(tmp_path / "out")
    assert event["event"] == "answer refused" and event["client"] == 2 and "read" in event["detail"]


def test_trouble_on_the_way_to_the_superlink_is_not_a_nodes(tmp_path):
    grid, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "out")

    def pulled(numbers):
        raise httpx.ConnectError("connection refused")

    grid.pull_messages = pulled
    with pytest.raises(httpx.ConnectError):
        serve(grid, chosen)


def test_an_answer_without_records_is_refused(tmp_path):
    grid, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "out")
    pull = grid.pull_messages

    def pulled(numbers):
        found = pull(numbers)
        for reply in found:
            if reply.metadata.src_node_id == FIRST + 2 and reply.metadata.message_type == "train":
                reply.__dict__["_content"] = reply.content["found"]
        return found

    grid.pull_messages = pulled
    assert serve(grid, chosen).records[0]["answered"] == [0, 1, 3]
    assert "ArrayRecord" in events(tmp_path / "out")[0]["detail"]
