"""The server: too few answers, a server that is killed, a run that is finished."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("flwr")

from loopback import FIRST, federation, small
from loopback_faults import events

from fedhb.errors import FailedRoundError, InputError
from fedhb.files import unsealed
from fedhb.flower.server_app import serve


def test_too_few_answers_fail_the_round_and_it_is_tried_again(tmp_path):
    """The failed attempt leaves nothing behind: the end is that of a federation without faults."""
    settings = small("empirical-bayes", rounds=2, fraction=1.0)
    clean = serve(*federation(settings, tmp_path / "clean"))
    failing = iter([True] * 3)

    def fault(client, message, reply):
        trains = "received" in message.content and message.content["order"]["round"] == 1
        return [] if trains and client < 3 and next(failing, False) else [reply]

    grid, chosen = federation(settings, tmp_path / "out", deadline=0.3)
    chosen["min-answers"] = 0.5
    grid.fault = fault
    run = serve(grid, chosen)
    assert run.records[0]["attempts"] == 2 and run.records[1]["attempts"] == 1
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())
    assert [e["event"] for e in events(tmp_path / "out")][-1] == "round failed"


def test_a_round_that_never_gets_enough_answers_ends_the_run_at_the_last_good_one(tmp_path):
    def fault(client, message, reply):
        return (
            []
            if "received" in message.content and message.content["order"]["round"] == 2
            else [reply]
        )

    settings = small("empirical-bayes", rounds=3, fraction=1.0)
    grid, chosen = federation(settings, tmp_path / "out", deadline=0.05, retries=1)
    grid.fault = fault
    with pytest.raises(FailedRoundError, match="2 attempts"):
        serve(grid, chosen)
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "failed"
    grid.fault = None
    run = serve(grid, chosen | {"resume": True})
    clean = serve(*federation(settings, tmp_path / "clean"))
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())


def test_a_node_that_is_gone_is_not_asked_and_one_that_comes_back_is(tmp_path):
    settings = small("empirical-bayes", rounds=3, fraction=1.0)
    grid, chosen = federation(settings, tmp_path / "out")

    def fault(client, message, reply):
        if "received" in message.content:
            grid.offline = {FIRST + 2} if message.content["order"]["round"] == 1 else set()
        return [reply]

    grid.fault = fault
    run = serve(grid, chosen)
    assert [r["answered"] for r in run.records] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert events(tmp_path / "out")[0]["detail"].endswith("not connected")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program may catch it and go on."""


@pytest.mark.parametrize(("algorithm", "every"), [("empirical-bayes", 2), ("fedpop", 3)])
def test_a_server_killed_at_any_call_resumes_to_the_same_bits(tmp_path, algorithm, every):
    """Every second or third push and pull of the run is once the last that the server does.

    FedPop's clients remember.
    """
    settings = small(algorithm, rounds=2, max_examples=10)
    clean = serve(*federation(settings, tmp_path / "clean"))
    for moment in range(1, 100, every):
        out = tmp_path / "out"
        grid, chosen = federation(settings, out)
        calls = 0

        def counted(method):
            def call(*args):
                nonlocal calls
                calls += 1
                if calls == moment:  # noqa: B023
                    raise Killed
                return method(*args)

            return call

        push, pull = grid.push_messages, grid.pull_messages
        grid.push_messages, grid.pull_messages = counted(push), counted(pull)
        try:
            serve(grid, chosen)
        except Killed:
            pass
        else:
            assert moment > 20
            return
        grid.push_messages, grid.pull_messages = push, pull
        run = serve(grid, chosen | {"resume": True})
        assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items()), (
            moment
        )
        assert [r["round"] for r in run.records] == [1, 2], moment
        assert run.result["personalised"] == clean.result["personalised"], moment
        shutil.rmtree(out)
    raise AssertionError("the run never ended")


def test_a_private_runs_checkpoint_does_not_say_who_took_part(tmp_path):
    """It is what a model is loaded from, and given away with."""
    serve(*federation(small("fedavg", rounds=2, dp_noise=0.2, dp_clip=0.5), tmp_path / "out"))
    manifests = [unsealed(path) for path in (tmp_path / "out" / "checkpoint").glob("round-*.json")]
    assert manifests and not any(manifest["counted"] for manifest in manifests)


def test_a_finished_run_is_not_run_again(tmp_path):
    grid, chosen = federation(small("empirical-bayes", rounds=1), tmp_path / "out")
    serve(grid, chosen)
    with pytest.raises(InputError, match=r"run.*resume"):
        serve(grid, chosen)
    asked = len(grid.sent)
    assert serve(grid, chosen | {"resume": True}).result["rounds"] == 1
    assert (
        len(grid.sent) == asked
        and json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "done"
    )


def test_nodes_with_another_network_are_refused(tmp_path, monkeypatch):
    """Another version of torch would make other first weights; the node says so instead of training
    them.
    """
    from fedhb.flower import client_app

    grid, chosen = federation(small("fedbabu", rounds=1, fraction=1.0), tmp_path / "out", retries=0)
    monkeypatch.setattr(
        client_app.FederatedTask,
        "shared_hash",
        lambda self, real=client_app.FederatedTask.shared_hash: real(self) + str(id(self)),
    )
    with pytest.raises(FailedRoundError):
        serve(grid, chosen)
    assert "versions" in events(tmp_path / "out")[0]["detail"]
