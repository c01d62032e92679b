"""Nodes that fail or lie, and a server that is killed: the round goes on without them, and nothing of theirs enters a sum.

tests/federation has the same with real processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    validate_object_content,
)
from loopback import FIRST, Loopback, config, federation, small

from fedhb.algorithms import build
from fedhb.answers.admission import Lengths, Refused
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.errors import DivergedError, InputError
from fedhb.files import unsealed
from fedhb.flower.server_app import serve
from fedhb.runs.from_settings import make_clients, train
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan


def spoiled(change):
    """A fault that changes the arrays of client 2's answers in round 1."""

    def fault(client, message, reply):
        if (
            client == 2
            and "received" in message.content
            and message.content["order"]["round"] == 1
            and reply.has_content()
        ):
            found = {key: array.numpy().copy() for key, array in reply.content["found"].items()}
            change(found)
            reply.content["found"] = ArrayRecord(
                {key: Array(value) for key, value in found.items()}
            )
        return [reply]

    return fault


def put(key, where, value):
    def change(found):
        found[key][where] = value

    return change


def renamed(found):
    found["n"] = found.pop("m")


def longer(found):
    found["m"] = np.concatenate([found["m"], found["m"]], axis=1)


def doubled(found):
    found["m"] = found["m"].astype(np.float64)


def negative(found):
    """With the others' examples these sum to nothing."""
    sizes = make_clients(small("niw"))[0].sizes
    found["examples"][:] = int(sizes[2] - sizes.sum())


def enormous(found):
    found["m"] *= 1e6


SPOILED = {
    "NaN": (put("m", (0, 3), np.nan), "'m' holds NaN or infinity"),
    "infinity": (put("m", (0, 0), np.inf), "'m' holds NaN or infinity"),
    "NaN in a report": (put("loss", (0,), np.nan), "'loss' holds NaN or infinity"),
    "another key": (renamed, "instead of"),
    "wrong shape": (longer, "has shape"),
    "wrong type": (doubled, "has type torch.float64"),
    "absurd norm": (enormous, "has norm"),
    "examples that cancel the others'": (negative, "it says it is of -"),
    "no examples": (put("examples", (0,), 0.0), "it says it is of 0 examples"),
    "half an example": (put("examples", (0,), 0.5), "it says it is of 0.5 examples"),
    "others' examples too": (put("examples", (0,), 1e6), "it says it is of 1e+06 examples"),
    "overflow in the sums": (put("m", (0, 0), 1e25), "has norm"),
}


def events(out):
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("what", SPOILED)
def test_a_bad_answer_is_refused_and_named_and_enters_no_sum(tmp_path, what):
    change, reason = SPOILED[what]
    settings = small("niw", rounds=1, fraction=1.0)
    grid, chosen = federation(settings, tmp_path / "out")
    grid.fault = spoiled(change)
    run = serve(grid, chosen)
    (event,) = events(tmp_path / "out")
    assert (
        event["event"] == "answer refused"
        and event["client"] == 2
        and event["node"] == FIRST + 2
        and event["round"] == 1
    )
    assert reason in event["detail"] and len(event["key"]) == 32
    assert run.records[0]["answered"] == [0, 1, 3]
    expected = without(settings, [0, 1, 3])
    for key, value in run.state.server.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "more", "key"),
    [("fedem", {}, "pi"), ("fedbe", {"fedbe": {"posterior": "dirichlet"}}, "g")],
)
def test_weights_that_are_negative_are_refused(tmp_path, algorithm, more, key):
    grid, chosen = federation(small(algorithm, rounds=1, fraction=1.0, **more), tmp_path / "out")
    grid.fault = spoiled(put(key, (0, 0), -0.5))
    assert serve(grid, chosen).records[0]["answered"] == [0, 1, 3]
    assert events(tmp_path / "out")[0]["detail"] == f"{key!r} holds negative weights"


def test_no_client_takes_over_the_average_by_its_word_for_its_examples(tmp_path):
    """Filters see vectors alone: the weight must be right before them."""
    settings = small("fedavg", rounds=1, fraction=1.0, defence="default")
    clean = serve(*federation(settings, tmp_path / "clean"))
    grid, chosen = federation(settings, tmp_path / "out")
    grid.fault = spoiled(
        lambda found: (negative(found), np.add(found["examples"], 1, out=found["examples"]))
    )
    run = serve(grid, chosen)
    assert run.records[0]["answered"] == [0, 1, 3]
    assert run.state.server["theta"].norm() < 2 * clean.state.server["theta"].norm()


def without(settings, positions):
    """The server's state after one round of the simulator with these clients alone."""
    clients, _ = make_clients(settings)
    from fedhb.flower.census import Census, Facts
    from fedhb.flower.federated_task import Task
    from fedhb.flower.node import Node

    census = Census.of(
        [Facts.of(Node(clients.select([k]), True, False)) for k in range(len(clients))]
    )
    task = Task.of(settings, census)
    rng, algorithm = Randomness(settings.seed, 1), build(settings.algorithm)
    server = algorithm.start(task.problem, Randomness(settings.seed))
    lr = settings.lr  # the step schedule of a single round
    plan = Plan(
        settings.local_epochs,
        settings.batch_size,
        lr,
        settings.momentum,
        algorithm.update == "full",
    )
    sums, _ = InProcess(task.problem, algorithm, clients, ClientStore()).run(
        server, positions, plan, rng
    )
    return algorithm.aggregate(task.problem, server, sums, rng)


def test_the_schedule_of_the_expected_round():
    """The helper above takes the learning rate of a run of one round from here."""
    from fedhb.engine.schedule import learning_rate

    assert learning_rate("step", 1.0, 0, 1) == 1.0


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
    assert "it is the answer of" in events(tmp_path / "out")[0]["detail"]


def test_a_client_that_raises_or_says_nothing_is_left_out(tmp_path):
    from flwr.app import Error, Message

    def fault(client, message, reply):
        if "received" not in message.content:
            return [reply]
        if client == 0:
            return [Message(Error(2, "out of memory"), reply_to=message)]
        return [] if client == 1 else [reply]

    grid, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "out", deadline=0.3)
    grid.fault = fault
    run = serve(grid, chosen)
    assert run.records[0]["answered"] == [2, 3]
    details = [e["detail"] for e in events(tmp_path / "out") if e["event"] == "answer refused"]
    assert details == ["error 2: out of memory", "no answer within 0.3 s"]
    assert run.result["per_client"]["global_accuracy"][:2] == [None, None]


def undecodable(kind: str):
    """What Flower raises, or gives, where a node uploads bytes that are not what their head says."""
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
    assert (
        event["event"] == "answer refused"
        and event["client"] == 2
        and "cannot be read" in event["detail"]
    )


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
    assert (
        events(tmp_path / "out")[0]["detail"] == "its answer cannot be read (it holds ArrayRecord)"
    )


def test_too_few_answers_fail_the_round_and_it_is_tried_again(tmp_path):
    """The failed attempt leaves nothing behind: the end is that of a federation without faults."""
    settings = small("niw", rounds=2, fraction=1.0)
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

    settings = small("niw", rounds=3, fraction=1.0)
    grid, chosen = federation(settings, tmp_path / "out", deadline=0.05, retries=1)
    grid.fault = fault
    with pytest.raises(DivergedError, match="too few answers in 2 attempts"):
        serve(grid, chosen)
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "failed"
    grid.fault = None
    run = serve(grid, chosen | {"resume": True})
    clean = serve(*federation(settings, tmp_path / "clean"))
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())


def test_a_node_that_is_gone_is_not_asked_and_one_that_comes_back_is(tmp_path):
    settings = small("niw", rounds=3, fraction=1.0)
    grid, chosen = federation(settings, tmp_path / "out")

    def fault(client, message, reply):
        if "received" in message.content:
            grid.offline = {FIRST + 2} if message.content["order"]["round"] == 1 else set()
        return [reply]

    grid.fault = fault
    run = serve(grid, chosen)
    assert [r["answered"] for r in run.records] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert events(tmp_path / "out")[0]["detail"] == "its node is not connected"


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
        and "belongs to another key" in event["detail"]
    )


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program may catch it and go on."""


@pytest.mark.parametrize(("algorithm", "every"), [("niw", 2), ("fedpop", 3)])
def test_a_server_killed_at_any_call_resumes_to_the_same_bits(tmp_path, algorithm, every):
    """Every second or third push and pull of the run is once the last that the server does. FedPop's clients remember."""
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
    """rounds.jsonl may be deleted, as the error of a damaged one says: clients go on with what they remember."""
    settings = small("fedpop", rounds=3, fraction=1.0, max_examples=10)
    clean = serve(*federation(settings, tmp_path / "clean"))
    grid, chosen = federation(settings, tmp_path / "out")
    stopped_in_round(grid, chosen, 3)
    (tmp_path / "out" / "rounds.jsonl").unlink()
    with pytest.warns(UserWarning, match="the records of rounds 1 to 2 are lost"):
        run = serve(grid, chosen | {"resume": True})
    assert all(torch.equal(run.state.server[k], v) for k, v in clean.state.server.items())
    assert run.result["personalised"] == clean.result["personalised"]
    asked = [m.content["order"] for m in grid.sent if m.metadata.message_type == "train"]
    assert [order["counted"] for order in asked if order["round"] == 3] == [2] * 4


def test_a_private_runs_checkpoint_does_not_say_who_took_part(tmp_path):
    """It is what a model is loaded from, and given away with."""
    serve(*federation(small("fedavg", rounds=2, dp_noise=0.2, dp_clip=0.5), tmp_path / "out"))
    manifests = [unsealed(path) for path in (tmp_path / "out" / "checkpoint").glob("round-*.json")]
    assert manifests and not any(manifest["counted"] for manifest in manifests)


def test_what_a_client_remembers_counts_only_where_its_answer_did(tmp_path):
    """A late or refused answer's memory is forgotten: the end is that of a run in which the round went well."""
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
    """With `keep`, a node that is started again and a run that is resumed find what their client remembered."""
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


def test_a_finished_run_is_not_run_again(tmp_path):
    grid, chosen = federation(small("niw", rounds=1), tmp_path / "out")
    serve(grid, chosen)
    with pytest.raises(InputError, match="already holds a run"):
        serve(grid, chosen)
    asked = len(grid.sent)
    assert serve(grid, chosen | {"resume": True}).result["rounds"] == 1
    assert (
        len(grid.sent) == asked
        and json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "done"
    )


def test_nodes_with_another_network_are_refused(tmp_path, monkeypatch):
    """Another version of torch would make other first weights; the node says so instead of training them."""
    from fedhb.flower import client_app

    grid, chosen = federation(small("fedbabu", rounds=1, fraction=1.0), tmp_path / "out", retries=0)
    monkeypatch.setattr(
        client_app.Task,
        "network_digest",
        lambda self, real=client_app.Task.network_digest: real(self) + str(id(self)),
    )
    with pytest.raises(DivergedError):
        serve(grid, chosen)
    assert "install the same versions" in events(tmp_path / "out")[0]["detail"]


def test_the_measure_of_lengths_follows_the_answers():
    def answer(scale):
        return {"m": torch.full((1, 100), scale), "loss": torch.tensor([1e9])}

    lengths = Lengths(answer(0.1), growth=10.0, least=50)
    lengths.check(answer(9.0))  # the floor: a vector of ones, times growth
    with pytest.raises(Refused):
        lengths.check(answer(11.0))
    for scale in (5.0, 5.0, 9.0):
        lengths.note(answer(scale))
    lengths.settle()
    lengths.check(answer(49.0))
    with pytest.raises(Refused):
        lengths.check(answer(51.0))
    with pytest.raises(Refused):
        lengths.check(answer(float("nan")))


def test_a_client_that_measures_curvature_in_a_round_is_not_too_long():
    """Of a network with many tensors: most clients measure none, and half of the answers are next to nothing."""
    lengths = Lengths({"curvature": torch.ones(1, 400)}, growth=100.0, least=16)
    lengths.note({"curvature": torch.zeros(1, 400)})
    lengths.settle()
    lengths.check({"curvature": torch.full((1, 400), 1e3)})


def test_the_simulator_is_not_disturbed(tmp_path):
    """The same settings still train in one process after all this."""
    assert train(small("niw", rounds=1), tmp_path / "out", progress=False).result["rounds"] == 1
