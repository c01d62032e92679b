"""Records: what is recorded is not run again, what was changed is."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from small_experiment import SETTINGS, Silent, complete, lines, plain, write

from fedhb.errors import DivergedError
from fedhb.runs.progress import JobProgress
from fedhb_paper import experiments, table, workbench


def test_a_record_says_how_it_came_about(tmp_path):
    write(tmp_path)
    watcher, now = complete(tmp_path, cells=["one"], algorithms=["niw S=0"])
    assert watcher.todo == 2 == len(lines(tmp_path))
    record = lines(tmp_path)[0]
    assert record["key"] == {"cell": "one", "variant": "niw S=0", "seed": 0}
    assert set(record["result"]["global"]) == {"accuracy", "nll", "brier", "ece"}
    assert (
        record["settings"]["niw.num_samples"] == 0
        and record["settings"]["rounds"] == 3
        and record["settings"]["model.hidden"] == 8
    )
    assert "workers" not in record["settings"]
    assert record["command"] == "fedhb paper small --cell one --algorithms 'niw S=0' --seeds 0"
    assert record["seconds"] > 0 and record["versions"]["torch"] and "commit" in record
    assert not list((tmp_path / "small").glob(".unfinished/*"))
    assert [r["key"] for r in now.records] == [
        r["key"] for r in lines(tmp_path)
    ] and not now.missing


def test_the_command_in_a_record_makes_it_again(tmp_path, run):
    write(tmp_path)
    complete(tmp_path, cells=["one"], algorithms=["niw S=0"])
    record = lines(tmp_path)[0]
    (tmp_path / "small/records.jsonl").unlink()
    import shlex

    assert run(*shlex.split(record["command"])[1:], "--folder", tmp_path)[0] == 0
    assert [plain(r) for r in lines(tmp_path)] == [plain(record)]


def test_what_is_recorded_is_made_again_and_compared(tmp_path, run, monkeypatch):
    write(tmp_path)
    words = (
        "paper",
        "small",
        "--folder",
        tmp_path,
        "--cell",
        "one",
        "--algorithms",
        "niw S=0",
        "--again",
    )
    code, printed = run(*words)
    assert code == 2 and "nothing of this is recorded" in printed
    complete(tmp_path, cells=["one"], algorithms=["niw S=0"])
    path = tmp_path / "small/records.jsonl"
    before = path.read_text()
    for _ in range(2):  # the second time anew, not from what the first one left
        code, printed = run(*words)
        assert code == 0 and "global accuracy │ 2 │" in printed
        assert path.read_text() == before
    record = json.loads(before.splitlines()[0])
    record["result"]["global"]["accuracy"] += 0.25
    path.write_text("\n".join([json.dumps(record), *before.splitlines()[1:]]) + "\n")
    assert "0.2500" in run(*words)[1] and "0.2500" not in printed
    monkeypatch.setattr(table, "run", lambda *arguments: pytest.fail("--show runs nothing"))
    code, printed = run(*words, "--show")
    assert code == 2 and "--show" in printed and "--again" in printed


def test_recorded_work_is_not_done_again(tmp_path, monkeypatch):
    write(tmp_path)
    complete(tmp_path, algorithms=["fedavg"], cells=["one"])
    monkeypatch.setattr(table, "run", lambda *arguments: pytest.fail("it was recorded"))
    watcher, now = complete(tmp_path, algorithms=["fedavg"], cells=["one"])
    assert watcher.todo == 0 and len(now.records) == 2


def test_a_run_that_another_table_has_is_taken_from_there(tmp_path, monkeypatch):
    write(tmp_path)
    _, first = complete(tmp_path, algorithms=["fedavg"], cells=["one"])
    other = SETTINGS.replace("[cells.one]", '[cells."the same"]').replace(
        "fedavg = {}", '"other name" = {algorithm = "fedavg"}'
    )
    write(tmp_path, other, name="other", printed="")
    write(tmp_path, "kind = 'table'\n[", name="broken", printed="")
    experiment = experiments.load(tmp_path, "other")
    keys = experiments.choose(experiment, cells=["the same"], algorithms=["other name"])
    monkeypatch.setattr(table, "run", lambda *arguments: pytest.fail("another table has it"))
    watcher, now = complete(tmp_path, name="other", cells=["the same"], algorithms=["other name"])
    assert watcher.todo == 0 and [r["result"] for r in now.records] == [
        r["result"] for r in first.records
    ]
    assert [r["key"] for r in now.records] == keys and {r["of"] for r in now.records} == {"small"}
    assert now.records[0]["command"] == first.records[0]["command"]
    changed = replace(
        experiment,
        settings={**experiment.settings, "common": {**experiment.settings["common"], "lr": 0.01}},
    )
    with pytest.raises(pytest.fail.Exception):
        workbench.complete(changed, keys, 1, Silent())


def test_a_run_that_diverges_is_recorded_as_such(tmp_path, monkeypatch):
    write(tmp_path)

    def diverges(*arguments):
        raise DivergedError("round 2: too far")

    monkeypatch.setattr(table, "run", diverges)
    watcher, now = complete(tmp_path, algorithms=["fedavg"], cells=["one"])
    assert [r["result"] for r in watcher.made] == [{"diverged": "round 2: too far"}] * 2
    assert not now.missing
    (shown, *_) = table.tables(experiments.load(tmp_path, "small").settings, [], now.records)
    assert list(shown.columns[1].cells) == [" 2 diverged"]


def test_changed_settings_make_a_record_stale(tmp_path, run):
    write(tmp_path)
    complete(tmp_path, cells=["one"])
    write(tmp_path, SETTINGS.replace("rounds = 3", "rounds = 2"))
    code, printed = run("paper", "small", "--folder", tmp_path, "--cell", "one", "--show")
    assert code == 0 and "6 stale, because rounds changed" in printed and "* by settings" in printed
    watcher, now = complete(tmp_path, cells=["one"], algorithms=["fedavg"])
    assert watcher.todo == 2 and {r["settings"]["rounds"] for r in now.records} == {2}
    write(tmp_path)  # as it was: the old records are valid again
    assert complete(tmp_path, cells=["one"])[0].todo == 0


def test_a_default_that_changes_makes_a_record_stale(tmp_path, monkeypatch):
    from fedhb.algorithms import FedAvg

    write(tmp_path)
    monkeypatch.setattr(FedAvg, "training", {"lr": 0.1})
    complete(tmp_path, cells=["one"], algorithms=["fedavg"])
    monkeypatch.setattr(FedAvg, "training", {"lr": 0.05})
    experiment = experiments.load(tmp_path, "small")
    now = workbench.standing(
        experiment, experiments.choose(experiment, cells=["one"], algorithms=["fedavg"])
    )
    assert [r["stale"] for r in now.stale] == [["lr"]] * 2


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            {"global": {"accuracy": 0.5, "nll": 1.0}, "personalised": {"accuracy": 0.75}},
            "global 50.00 %, personalised 75.00 %",
        ),
        (
            {"global": {"rmse": 12.3456, "nll": 1.5}, "personalised": None},
            "global RMSE 12.35, NLL 1.5",
        ),
    ],
)
def test_a_record_says_what_it_found_also_of_real_targets(result, says):
    console = Console(file=io.StringIO(), width=200)
    shown = JobProgress("small", console)
    shown.begin(1)
    shown.recorded({"key": {"cell": "one", "seed": 0}, "seconds": 1.0, "result": result})
    assert f"1/1 one, seed 0: 1.0 s, {says}; 0 s left" in console.file.getvalue()
