"""The benchmark: it runs, its results have the shape that is promised, and all contenders do the
same work.

No time is judged.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhb.algorithms import ALGORITHMS
from fedhb.cli import main
from fedhb.network.nets.mobilenet import FastConvolution
from fedhb_paper.bench import flower_peer, machine, measure, side_by_side, w1, w2, w3, w4
from fedhb_paper.bench.bench_task import Task
from fedhb_paper.bench.memory_use import PeakMemory, own_processes, resident_bytes
from fedhb_paper.bench.ours import Ours
from fedhb_paper.bench.peers import Handwritten, PlainProcesses, PlainTorch, agreement
from fedhb_paper.bench.processes import Team, apart, shared_floats

MLP = Task(
    "mlp", (12,), num_clients=6, examples=20, per_round=3, batch_size=8, options={"hidden": 5}
)
MOBILENET = Task(
    "mobilenet", (3, 16, 16), 3, examples=6, per_round=2, batch_size=3, options={"width": 0.125}
)
CONTENDERS = {
    "plain_torch_1",
    "plain_torch_best",
    "handwritten",
    "fedavg",
    "fedbabu",
    "niw",
    "mixture",
}


@pytest.fixture(scope="module", autouse=True)
def optimiser_imported():
    """Torch's first optimiser imports for a second or two: here, once, and not in every process
    that is forked.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """`fedhb bench` on tiny work, without Flower: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "ARRAY_BYTES", 2**20)
    monkeypatch.setattr(w1, "SIZE", MLP)
    monkeypatch.setattr(w2, "SIZE", replace(MOBILENET, examples=3))
    monkeypatch.setattr(w3, "SIZE", w3.Size(width=0.125, counts=(2, 3)))
    monkeypatch.setattr(
        w4, "SIZE", w4.Size(populations=(10, 40), per_round=4, examples=5, pool=50, features=6)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for module in (side_by_side, w1):  # two threads on a busy machine wait for each other
        monkeypatch.setattr(module, "cores", lambda: 1)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    return command


def test_all_works_and_their_results(bench, tmp_path):
    code, printed = bench("--repeats", "2", "--json", "results.json")
    assert code == 0
    assert all(f"{name}:" in printed for name in ("W1", "W2", "W3", "W4"))
    assert "flower left out" in printed and "fedhb-paper[bench-peers]" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {"machine", "W1", "W2", "W3", "W4"}
    assert results["machine"]["bandwidth_bytes_1"] > 0 and results["machine"]["cores"] >= 1
    assert os.uname().nodename not in json.dumps(results["machine"])
    for name in ("W1", "W2"):
        work = results[name]
        assert set(work["ratio"]) == set(work["spread"]) == CONTENDERS
        for contender in CONTENDERS:
            assert work["ratio"][contender] == pytest.approx(
                work["plain_torch_1"] / work[contender]
            )
        assert work["niw_over_fedbabu"]["ratio"] == pytest.approx(work["niw"] / work["fedbabu"])
        assert len(work["mixture_over_fedbabu"]["quartiles"]) == 2
    assert list(results["W1"]["algorithms"]) == list(ALGORITHMS)
    assert results["W1"]["algorithms"]["fedbabu"]["ratio"] == 1.0
    assert results["W2"]["scale"] == pytest.approx(500 / 3)
    for name in ("fedavg", "niw", "mixture"):
        assert set(results["W3"][name]) == set(results["W3"]["peak_bytes"][name]) == {"2", "3"}
        one_pass = 3 * results["W3"]["upload_bytes"][name] / results["W3"]["bandwidth_bytes"]
        assert results["W3"]["ratio"][name]["3"] == pytest.approx(
            one_pass / results["W3"][name]["3"]
        )
    for name in ("fedavg", "niw"):
        assert set(results["W4"][name]) == set(results["W4"]["round_bytes"][name]) == {"10", "40"}
        assert results["W4"]["ratio"][name]["10"] == 1.0


def test_one_work_and_one_repeat(bench, tmp_path):
    code, printed = bench("w4", "--repeats", "1", "--json", "results.json")
    assert code == 0 and "W4:" in printed and "W3:" not in printed
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"machine", "W4"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["W9"], ["'W9'", "W1, W2, W3, W4"]),
        (["W1", "--repeats", "0"], ["repeats=0", "at least 1"]),
        (["W1", "--json", "nowhere/results.json"], ["nowhere", "folder"]),
    ],
)
def test_bad_input_exits_2(bench, arguments, says):
    code, printed = bench(*arguments)
    assert code == 2
    assert all(word in printed for word in says)
    assert "Traceback" not in printed


def rounds_of(contender, count=2):
    """The network after some rounds, copied out of the contender before it is closed."""
    try:
        for _ in range(count):
            contender()
        return {name: value.clone() for name, value in contender.weights().items()}
    finally:
        contender.close()


def test_all_do_the_same_work_on_the_mlp():
    clients = MLP.clients()
    plain = rounds_of(PlainTorch(MLP, clients, threads=1))
    assert (
        agreement(plain, MLP.model().state_dict()) > 1e-3
    )  # it has moved, and not every difference is small
    for other in (
        Ours("fedavg", MLP, clients),
        Ours("fedavg", MLP, clients, alone=True),
        Handwritten(MLP, clients),
        Handwritten(MLP, clients, processes=2),
        Handwritten(MLP, clients, processes=4),  # one of the four has no client
    ):
        assert agreement(rounds_of(other), plain) < 1e-6, type(other)


def test_all_do_the_same_work_on_images():
    task = Task("convnet", (1, 28, 28), 3, examples=6, per_round=2, batch_size=3)
    clients = task.clients()
    contenders = (
        PlainTorch(task, clients, threads=1),
        PlainProcesses(task, clients, processes=2),
        Ours("fedavg", task, clients),
    )
    plain, processes, ours = (rounds_of(c) for c in contenders)
    assert agreement(plain, task.model().state_dict()) > 1e-3
    assert agreement(processes, plain) < 1e-5 and agreement(ours, plain) < 1e-5
    # deep batch norm magnifies the rounding of another layout a thousandfold in the gradients, not
    # in its running statistics
    clients, task = MOBILENET.clients(), replace(MOBILENET, lr=1e-9)
    plain, ours = (
        rounds_of(c, 1)
        for c in (PlainTorch(task, clients, threads=1), Ours("fedavg", task, clients))
    )
    assert {name for name in plain if not name.endswith("num_batches_tracked")} == set(ours)
    assert agreement(plain, task.model().state_dict()) > 1e-2
    assert agreement(ours, plain) < 1e-4


def test_all_do_the_same_work_by_the_protocol_of_the_cifar_experiments():
    """With momentum, and batch norm by the batch: W2's own settings; plain PyTorch has torch's own
    convolutions.
    """
    task = replace(MOBILENET, momentum=w2.FULL.momentum, batch_norm=w2.FULL.batch_norm, lr=1e-9)
    assert (task.momentum, task.batch_norm) == (0.9, "batch")
    clients = task.clients()
    contenders = (
        PlainTorch(task, clients, threads=1),
        PlainProcesses(task, clients, processes=2),
        Ours("fedavg", task, clients),
    )
    plain, processes, ours = (rounds_of(c, 1) for c in contenders)
    assert agreement(ours, plain) < 1e-6 and agreement(processes, plain) < 1e-6
    assert not any(isinstance(module, FastConvolution) for module in task.ordinary().modules())
    assert any(isinstance(module, FastConvolution) for module in task.model().modules())
    moved = replace(task, lr=0.01, batch_size=6)  # a step of each client
    plain, ours = (
        rounds_of(c, 1)
        for c in (PlainTorch(moved, clients, threads=1), Ours("fedavg", moved, clients))
    )
    assert agreement(plain, moved.ordinary().state_dict()) > 1e-4 > agreement(ours, plain)


def test_flower_does_the_same_work():
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    task = replace(MLP, per_round=MLP.num_clients)  # Flower samples cohorts of its own
    flower, plain = flower_peer.Flower(task), PlainTorch(task, task.clients(), threads=1)
    try:
        flower()
        for _ in range(2):
            plain()
        theirs = {name: torch.from_numpy(value) for name, value in flower.weights().items()}
        assert agreement(theirs, plain.weights()) < 1e-6
    finally:
        flower.close()


def test_a_flower_that_fails_is_left_out_with_what_it_said(monkeypatch):
    monkeypatch.setattr(flower_peer, "_simulate", _say_and_end)
    with pytest.raises(RuntimeError, match="no such backend"):
        flower_peer.Flower(MLP)
    monkeypatch.setattr(side_by_side, "missing", lambda: None)
    monkeypatch.setattr(side_by_side, "cores", lambda: 1)
    clients = MLP.clients()
    results = side_by_side.side_by_side(
        MLP,
        clients,
        {"handwritten": lambda: Handwritten(MLP, clients)},
        1,
        lambda share, what: None,
        settle=False,
    )
    assert "flower" not in results and "no such backend" in results["notes"][0]


def _say_and_end(pipe, task, actors, folder):
    Path(folder, "log").write_text("no such backend")


def test_ratios_and_quartiles():
    seconds = {"plain_torch_1": [2.0, 4.0, 2.0], "x": [1.0, 1.0, 2.0]}
    results = measure.compare(seconds, scale=10.0)
    assert (results["plain_torch_1"], results["x"]) == (20.0, 10.0)
    assert results["ratio"]["x"] == 2.0 and results["spread"]["x"] == [1.5, 3.0]
    assert measure.quartiles([7.0]) == [7.0, 7.0]
    assert measure.best_of(seconds, ["plain_torch_1", "x"]) == "x"


def test_contenders_take_turns_after_a_warm_up():
    told, calls = [], []
    rounds = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = measure.alternate(rounds, 2, lambda share, what: told.append(what), settle=False)
    assert "".join(calls) == "ab" + "ab" * 2 and told == list("ababab")
    assert [len(times) for times in seconds.values()] == [2, 2]
    calls.clear()
    measure.alternate(rounds, 1, lambda share, what: None)
    assert "".join(calls) == "ab" + "aabb"


def _fail(tell):
    tell(0.5, "half")
    raise ValueError("no")


def _die(tell):
    os._exit(3)


def test_a_measurement_in_a_process_of_its_own():
    told = []
    with pytest.raises(ValueError, match="no"):
        apart(_fail, tell=lambda share, what: told.append((share, what)))
    assert told == [(0.5, "half")]
    with pytest.raises(RuntimeError, match="exit code 3"):
        apart(_die)


def test_helpers_write_to_shared_memory():
    numbers = shared_floats(3, 2)
    team = Team(3, lambda helper, value: numbers[helper].fill_(helper + value))
    try:
        team(10)
        assert numbers.tolist() == [[10, 10], [11, 11], [12, 12]]
    finally:
        team.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_memory_is_counted():
    def rise(tell):
        peak = PeakMemory(own_processes())
        room = mmap.mmap(-1, 2**25)  # 34 MB that the process did not have before
        np.frombuffer(room, np.uint8)[:] = 1
        return peak.rise()

    assert 30e6 < apart(rise) < 60e6
    assert resident_bytes(own_processes()) > 10e6
