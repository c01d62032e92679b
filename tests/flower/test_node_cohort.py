"""Nodes that fail or lie: the round goes on without them, and nothing of theirs enters a sum.

tests/federation has the same with real processes.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord
from loopback import FIRST, federation, small
from loopback_faults import events, without

from fedhb.flower.server_app import serve
from fedhb.runs.from_settings import make_clients, train


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
    "NaN": (put("m", (0, 3), np.nan), "'m'.*NaN"),
    "infinity": (put("m", (0, 0), np.inf), "'m'.*NaN"),
    "NaN in a report": (put("loss", (0,), np.nan), "'loss'.*NaN"),
    "another key": (renamed, r"\bn\b"),
    "wrong shape": (longer, "shape"),
    "wrong type": (doubled, "torch.float64"),
    "absurd norm": (enormous, "norm"),
    "examples that cancel the others'": (negative, r" -\d+"),
    "no examples": (put("examples", (0,), 0.0), " 0 examples"),
    "half an example": (put("examples", (0,), 0.5), " 0.5 examples"),
    "others' examples too": (put("examples", (0,), 1e6), r" 1e\+06 examples"),
    "overflow in the sums": (put("m", (0, 0), 1e25), "norm"),
}


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
    assert re.search(reason, event["detail"]) and len(event["key"]) == 32
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
    assert events(tmp_path / "out")[0]["detail"].startswith(repr(key))


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


def test_the_schedule_of_the_expected_round():
    """The helper above takes the learning rate of a run of one round from here."""
    from fedhb.engine.schedule import learning_rate

    assert learning_rate("step", 1.0, 0, 1) == 1.0


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


def test_the_simulator_is_not_disturbed(tmp_path):
    """These settings still train in one process."""
    assert train(small("niw", rounds=1), tmp_path / "out", progress=False).result["rounds"] == 1


def test_the_servers_memory_does_not_grow_with_the_cohort(tmp_path):
    """Answers are pulled one by one: never two at once."""
    grid, chosen = federation(small("niw", fraction=1.0), tmp_path / "out")
    pulled, pull = [], grid.pull_messages

    def counting(ids):
        replies = pull(ids)
        pulled.append((len(list(ids)), len(replies)))
        return replies

    grid.pull_messages = counting
    serve(grid, chosen)
    assert max(asked for asked, _ in pulled) == 1 and max(came for _, came in pulled) == 1
