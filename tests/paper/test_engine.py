"""Experiments: what is recorded is not run again, what was killed goes on, what changed is run anew, processes change nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Column, Table
from small import COMMON, SETTINGS, write

from fedhb.cli import main
from fedhb.errors import DivergedError, InputError
from fedhb.runs import jobs, records
from fedhb.runs.progress import JobProgress
from fedhb_paper import cells, experiments, table, workbench
from fedhb_paper.markdown import as_markdown


class Silent:
    """A watcher that remembers."""

    def __init__(self):
        self.made, self.todo = [], None

    def begin(self, todo):
        self.todo = todo

    def tell(self, job, share, text):
        assert 0 <= share <= 1 and text

    def recorded(self, record):
        self.made.append(record)


def complete(folder, processes=1, name="small", **choice):
    experiment = experiments.load(folder, name)
    watcher = Silent()
    now = workbench.complete(
        experiment, experiments.choose(experiment, **choice), processes, watcher
    )
    return watcher, now


def lines(folder):
    return [json.loads(line) for line in (folder / "small/records.jsonl").read_text().splitlines()]


def plain(record):
    """A record without what differs from run to run."""
    result = {key: value for key, value in record["result"].items() if key != "seconds"}
    return {**{key: value for key, value in record.items() if key != "seconds"}, "result": result}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command: (exit code, what it printed)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    return command


# ---- records


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
    assert (
        code == 2
        and "--show runs nothing, --again runs what is recorded a second time: choose one"
        in printed
    )


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


def test_a_line_ends_where_json_ends_it(tmp_path):
    key = {"cell": "a\u2028b\x85c", "seed": 0}
    records.append(tmp_path / "records.jsonl", {"key": key})
    assert [r["key"] for r in records.read(tmp_path / "records.jsonl")] == [key]


def test_a_line_cut_short_is_passed_over_and_hurts_no_other(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, {"key": {"seed": 0}})
    with path.open("ab") as file:
        file.write(b'{"key": {"seed": 1}, "resu')
    assert [r["key"] for r in records.read(path)] == [{"seed": 0}]
    records.append(path, {"key": {"seed": 2}})
    records.append(path, {"key": {"seed": 3}})
    assert [r["key"]["seed"] for r in records.read(path)] == [0, 2, 3]
    path.write_bytes(path.read_bytes() + b"[1]\n\xff\n{}\n")
    assert [r["key"]["seed"] for r in records.read(path)] == [0, 2, 3]


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


# ---- stale records


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


def test_a_setting_that_is_new_matters_only_where_it_is_not_what_there_was_before():
    def effective(settings, names):
        return dict.fromkeys(names, 0) | dict(settings)

    record = {"settings": {"lr": 0.1}}
    assert records.changed(record, {"lr": 0.1, "new": 0}, effective) == []
    assert records.changed(record, {"lr": 0.1, "new": 1}, effective) == ["new"]
    assert records.changed(record, {"new": 0}, effective) == ["lr"]
    assert records.changed(record, {"lr": 0.1, "new": 0}, lambda settings, names: settings) == [
        "new"
    ]
    assert records.changed({"settings": {"a": [1, 2]}}, {"a": (1, 2)}, effective) == []


def test_niws_longer_step_makes_records_stale_that_were_made_before_it():
    now = {
        "niw.dof": "per_layer",
        "niw.relax": True,
        "niw.along": True,
        "niw.same_steps": True,
        "lr": 0.1,
    }
    record = {"settings": {"niw.dof": "per_layer", "niw.relax": True}}
    assert records.changed(record, now, cells.effective) == ["niw.along", "niw.same_steps"]
    for other in (
        {"niw.relax": False, "niw.same_steps": False},
        {"niw.dof": "full"},
    ):  # where it does nothing
        assert (
            records.changed({"settings": record["settings"] | other}, now | other, cells.effective)
            == []
        )
        assert (
            records.changed(
                {"settings": now | other}, now | other | {"niw.along": False}, cells.effective
            )
            == []
        )


def test_the_newest_valid_record_counts():
    key = {"seed": 0}
    kept = [{"key": key, "settings": {"a": a}, "result": n} for n, a in enumerate((1, 1, 2, 3))]
    for now, result, stale in ((1, 1, []), (2, 2, []), (9, 3, ["a"])):
        (found,) = records.current(
            kept, [(key, {"a": now})], lambda settings, names: settings
        ).values()
        assert (found["result"], found["stale"]) == (result, stale)


# ---- choosing


def test_choosing(tmp_path):
    more = '"niw S=5" = {algorithm = "niw", niw = {num_samples = 5}}\n[cells.other]\ndataset = "mnist"\n'
    write(tmp_path, SETTINGS.replace("niw = {}\n", "") + more)
    experiment = experiments.load(tmp_path, "small")
    assert len(experiments.choose(experiment)) == 2 * 3 * 3
    assert {k["cell"] for k in experiments.choose(experiment, datasets=["digits"])} == {
        "one",
        "two epochs",
    }
    assert {k["variant"] for k in experiments.choose(experiment, algorithms=["niw"])} == {
        "niw S=0",
        "niw S=5",
    }
    assert {k["variant"] for k in experiments.choose(experiment, algorithms=["niw S=0"])} == {
        "niw S=0"
    }
    for wrong, says in (
        (
            {"cells": ["ones"]},
            r"--cell ones .did you mean 'one'..: small has one, two epochs, other",
        ),
        ({"datasets": ["emnist"]}, r"--dataset emnist"),
        (
            {"algorithms": ["mixture"]},
            r"--algorithms mixture: small has niw S=0, fedavg, niw S=5, niw",
        ),
        ({"cells": ["one"], "datasets": ["mnist"]}, "--cell one: small has other"),
    ):
        with pytest.raises(InputError, match=says):
            experiments.choose(experiment, **wrong)


def test_a_cell_may_have_seeds_and_variants_of_its_own(tmp_path):
    settings = SETTINGS.replace(
        "local_epochs = 2\n", 'local_epochs = 2\nseeds = [0, 5]\nonly = ["fedavg"]\n'
    )
    experiment = experiments.load(write(tmp_path, settings), "small")
    theirs = [key for key in experiments.choose(experiment) if key["cell"] == "two epochs"]
    assert [(key["variant"], key["seed"]) for key in theirs] == [("fedavg", 0), ("fedavg", 5)]
    assert len(experiments.choose(experiment)) == 2 * 3 + 2
    assert (
        experiment.resolved(theirs[0])["local_epochs"] == 2
    )  # seeds and only are no settings of a run
    asked = experiments.choose(experiment.with_seeds([7]))
    assert {key["seed"] for key in asked} == {7} and len(asked) == 3 + 1
    write(tmp_path, settings.replace('only = ["fedavg"]', 'only = ["fedavgs"]'))
    with pytest.raises(
        InputError, match=r"cell 'two epochs': only has 'fedavgs' .did you mean 'fedavg'"
    ):
        experiments.choose(experiments.load(tmp_path, "small"))


def test_listing_and_errors_of_the_command(tmp_path, run, monkeypatch):
    write(tmp_path)
    write(tmp_path, SETTINGS.replace('"digits"', '"imagenet"'), "large", "")
    write(tmp_path, 'title = "t"\nkind = "tabel"\n', "wrong", "")
    code, printed = run("paper", "--folder", tmp_path)
    assert code == 0 and "0 of 12" in printed and "digits, small" in printed
    assert "needs imagenet: it is not a data set of fedhb yet" in printed
    assert "kind='tabel' (did you mean 'table'?)" in printed
    code, printed = run("paper", "large", "--folder", tmp_path)
    assert code == 2 and "needs the data set imagenet: it is not a data set of fedhb yet" in printed
    code, printed = run("paper", "smal", "--folder", tmp_path)
    assert code == 2 and "did you mean 'small'" in printed
    code, printed = run("paper", "small", "--folder", tmp_path / "none")
    assert code == 2 and "there is no such folder" in printed
    for seeds in ("one", ",", ""):
        code, printed = run("paper", "small", "--folder", tmp_path, "--seeds", seeds)
        assert code == 2 and f"seeds='{seeds}': give whole numbers" in printed
    code, printed = run("paper", "small", "--folder", tmp_path, "--algorithms", ",")
    assert code == 2 and "algorithms=',': name at least one" in printed
    monkeypatch.chdir(tmp_path)
    code, printed = run("paper")
    assert code == 2 and "clone of fedhb's repository" in printed and "--folder" in printed


def test_the_folder_is_found_from_below(tmp_path, monkeypatch):
    write(tmp_path / "experiments")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fedhb"\n')
    (tmp_path / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep/er")
    assert experiments.find_folder(None) == tmp_path / "experiments"


def test_seeds_of_the_command_replace_those_of_the_file(tmp_path, run):
    write(tmp_path)
    assert (
        run(
            "paper",
            "small",
            "--folder",
            tmp_path,
            "--cell",
            "one",
            "--algorithms",
            "fedavg",
            "--seeds",
            "7",
        )[0]
        == 0
    )
    assert [r["key"]["seed"] for r in lines(tmp_path)] == [7]


def test_settings_with_a_mistake_are_refused(tmp_path):
    write(tmp_path, SETTINGS.replace("rounds = 3", "round = 3"))
    experiment = experiments.load(tmp_path, "small")
    with pytest.raises(InputError, match="cell 'one', variant 'niw': unknown setting 'round'"):
        workbench.standing(experiment, experiments.choose(experiment))
    write(tmp_path, SETTINGS.replace("seeds = [0, 1]", ""))
    with pytest.raises(InputError, match="has no seeds"):
        experiments.choose(experiments.load(tmp_path, "small"))


# ---- what is shown


def test_tables_as_markdown():
    table = Table("a", Column("b", justify="right"), title="[bold]t[/bold]", caption="c")
    table.add_row("x|y", "[green]1[/green]")
    table.add_row("two\nlines", "2")
    expected = [
        "**t**",
        "",
        "| a | b |",
        "| --- | ---: |",
        "| x\\|y | 1 |",
        "| two<br>lines | 2 |",
        "",
        "c",
        "",
    ]
    assert as_markdown(table).split("\n") == expected


def test_ours_beside_the_printed(tmp_path, run):
    write(tmp_path)
    complete(tmp_path)
    code, printed = run("paper", "small", "--folder", tmp_path, "--show")
    assert code == 0 and "12 of 12 records are there" in printed
    values = [
        100 * r["result"]["global"]["accuracy"]
        for r in lines(tmp_path)
        if r["key"]["cell"] == "one" and r["key"]["variant"] == "niw"
    ]
    mean, deviation = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    assert f"{mean:.2f} ±{deviation:.2f}" in printed
    for text in (
        "printed 97.80 ±0.12",
        "printed 97.16",
        "printed 98.00 ±1.50",
        "mean ranks",
        "Friedman",
    ):
        assert text in printed
    _, printed = run("paper", "small", "--folder", tmp_path, "--show", "--algorithms", "fedavg")
    assert "printed 97.16" in printed and "printed 97.80" not in printed


def test_printed_numbers_are_read(tmp_path):
    write(
        tmp_path,
        printed="cell,algorithm,task,metric,mean,std\na,niw,up,formula,2d,\na,niw,global,accuracy,1.50,0.25\n",
    )
    formula, number = experiments.load(tmp_path, "small").printed()
    assert (
        formula["mean"] == "2d"
        and formula["std"] is None
        and (number["mean"], number["std"]) == (1.5, 0.25)
    )
    write(tmp_path, printed="cell,method,mean\n")
    with pytest.raises(InputError, match=r"printed\.csv: its columns"):
        experiments.load(tmp_path, "small").printed()


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


def test_progress_of_several_stages_on_a_terminal():
    """Rich allows one display at a time; tuning begins one for every stage."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(table.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    for _ in range(2):
        shown.begin(1)
        shown.tell(job, 0.5, "round 1/2")
        shown.recorded({"key": job.key, "seconds": 1.0, "result": {"global": {"accuracy": 0.5}}})
    shown.close()
    shown.close()
    assert console.file.getvalue().count("1/1 one, niw, seed 0: 1.0 s, global 50.00 %") == 2


def test_long_work_says_how_it_goes_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("fedhb.runs.progress.time.monotonic", lambda: next(clock))
    clock = iter([0.0, 1.0, 1.0, 200.0, 200.0, 302.0, 302.0, 302.0, 400.0, 400.0])
    console = Console(file=io.StringIO(), width=200)
    shown = JobProgress("small", console)
    job = jobs.Job(table.run, {}, {"cell": "one", "variant": "niw", "seed": 0}, Path())
    shown.begin(1)
    for done in (1, 2, 3, 4):
        shown.tell(job, 0.5, f"round {done}/4")
    assert console.file.getvalue() == "one, niw, seed 0: round 3/4\n"


# ---- processes, kills


def test_processes_change_nothing(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    complete(tmp_path / "a", cells=["one"], algorithms=["niw", "fedavg"])
    complete(tmp_path / "b", cells=["one"], algorithms=["niw", "fedavg"], processes=2)
    a, b = (
        [plain(r) for r in sorted(lines(tmp_path / x), key=lambda r: records.identity(r["key"]))]
        for x in "ab"
    )
    assert len(a) == 4 and a == b


def test_errors_come_back_from_processes(tmp_path):
    job = jobs.Job(
        table.run,
        {"cells": {"c": {"dataset": "nosuch"}}, "variants": {"niw": {}}},
        {},
        tmp_path,
    )
    keys = [{"cell": "c", "variant": "niw", "seed": seed} for seed in (0, 1)]
    with pytest.raises(InputError, match="unknown data set 'nosuch'"):
        list(jobs.perform([replace(job, key=key) for key in keys], 2, lambda *told: None))
    with pytest.raises(RuntimeError, match="KeyError"):
        list(
            jobs.perform([replace(job, key={"cell": c}) for c in ("x", "y")], 2, lambda *told: None)
        )


LONG = f"""
title = "long"
kind = "table"
seeds = [0]
{COMMON}
[cells.c]
dataset = "digits"
rounds = 4000
checkpoint_every = 50
[variants]
fedavg = {{}}
fedbabu = {{}}
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize(
    ("count", "how"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGINT)]
)
def test_killed_work_goes_on_from_its_checkpoint(tmp_path, count, how):
    """A process is killed in the middle of training. Its children end too, and what was trained is not trained again."""
    write(tmp_path, LONG, printed="")
    command = [
        sys.executable,
        "-m",
        "fedhb",
        "paper",
        "small",
        "--folder",
        str(tmp_path),
        "--jobs",
        str(count),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while (
        len(
            {
                path.parent
                for path in (tmp_path / "small").glob(".unfinished/*/checkpoint/round-*.json")
            }
        )
        < count
    ):
        assert process.poll() is None and time.monotonic() < until, "no checkpoint"
        time.sleep(0.02)
    below = children(process.pid)
    process.send_signal(how)
    assert process.wait(30) == (130 if how == signal.SIGINT else -9)
    process.stderr.close()
    while any(alive(pid) for pid in below):
        assert time.monotonic() < until, "its children live on"
        time.sleep(0.05)
    assert not records.read(tmp_path / "small/records.jsonl")

    # the rest with few rounds left: by what the first round told
    told = []
    experiment = experiments.load(tmp_path, "small")

    class Stop(Exception):
        pass

    class Watcher(Silent):
        def tell(self, job, share, text):
            told.append(text)
            raise Stop

    with pytest.raises(Stop):
        workbench.complete(
            experiment, experiments.choose(experiment, algorithms=["fedavg"]), 1, Watcher()
        )
    assert int(told[0].split()[1].split("/")[0]) >= 50


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "halves")
    whole, _ = complete(tmp_path / "whole", cells=["one"], algorithms=["fedavg"])
    experiment = experiments.load(tmp_path / "halves", "small")
    keys = experiments.choose(experiment, cells=["one"], algorithms=["fedavg"])

    class Interrupts(Silent):
        def tell(self, job, share, text):
            if text.startswith("round 2"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workbench.complete(experiment, keys, 1, Interrupts())
    assert list((tmp_path / "halves/small").glob(".unfinished/*/checkpoint/round-*.json"))
    halves, _ = complete(tmp_path / "halves", cells=["one"], algorithms=["fedavg"])
    assert [plain(r) for r in halves.made] == [plain(r) for r in whole.made]
    assert not (tmp_path / "halves/small/.unfinished").exists()
