"""Cells at another width and for a part of the rounds, cells by their parts, and images that no
client has.
"""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
from small_experiment import complete, lines, plain, write

from fedhb import data
from fedhb.data.dataset import Dataset, Examples
from fedhb.errors import InputError
from fedhb_paper import clean_images, experiments, scale, table
from fedhb_paper.scale import Scale

SETTINGS = """
title = "digits, wide and narrow"
kind = "table"
seeds = [0]
[common]
dataset = "digits"
num_clients = 6
shards_per_client = 4
rounds = 4
batch_size = 30
personal_epochs = 1
model = "narrow:net"
[cells."s=4 f=0.5 tau=1"]
fraction = 0.5
[cells."s=4 f=0.5 tau=2"]
fraction = 0.5
local_epochs = 2
[cells."s=4 f=1.0 tau=1"]
fraction = 1.0
rounds = 8
[variants]
fedbabu = {}
fedavg = {}
"""
PRINTED = "cell,algorithm,task,metric,mean,std\ns=4 f=0.5 tau=1,fedavg,global,accuracy,97.16,\n"
NET = "from fedhb.network.nets import mlp\ndef net(shape, outputs, width=1.0):\n    return mlp(shape, outputs, hidden=int(8 * width))\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "experiments", SETTINGS, printed=PRINTED)


def cells_of(experiment, *words):
    return list(dict.fromkeys(key["cell"] for key in experiments.choose(experiment, cells=words)))


def test_names_say_the_scale():
    for one in (Scale(), Scale(0.25), Scale(1.0, 0.1), Scale(0.5, 0.5)):
        assert scale.parse(scale.name("s=100 f=0.1 tau=1", one)) == ("s=100 f=0.1 tau=1", one)
    assert scale.name("one", Scale()) == "one"
    assert scale.name("one", Scale(0.25, 0.5)) == "one width=0.25 rounds=0.5"
    assert scale.parse("one width=large") == ("one width=large", Scale())
    for wrong in ({"width": 0.0}, {"rounds": 1.5}, {"rounds": 0.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Scale(**wrong)


def test_a_scaled_cell_has_its_width_and_its_share_of_the_rounds(folder):
    experiment = experiments.load(folder, "small").scaled([Scale(0.5, 0.5)])
    keys = experiments.choose(experiment)
    assert {key["cell"] for key in keys} == {
        f"s=4 {rest} width=0.5 rounds=0.5" for rest in ("f=0.5 tau=1", "f=0.5 tau=2", "f=1.0 tau=1")
    }
    settings = [experiment.resolved(key) for key in keys if key["variant"] == "fedavg"]
    assert [one["rounds"] for one in settings] == [2, 2, 4]
    assert all(one["model.width"] == 0.5 and one["model"] == "narrow:net" for one in settings)


def test_cells_are_chosen_by_their_parts(folder):
    experiment = experiments.load(folder, "small")
    assert (
        cells_of(experiment, "s=4,f=0.5,tau=1")
        == ["s=4 f=0.5 tau=1"]
        == cells_of(experiment, "tau=1 f=0.5")
    )
    assert cells_of(experiment, "tau=1") == ["s=4 f=0.5 tau=1", "s=4 f=1.0 tau=1"]
    assert cells_of(experiment, "tau=2", "f=1.0") == ["s=4 f=0.5 tau=2", "s=4 f=1.0 tau=1"]
    narrow = experiment.scaled([Scale(), Scale(0.25)])
    for word in ("s=4 f=0.5 tau=1", "s=4,f=0.5,tau=1"):
        assert cells_of(narrow, word) == ["s=4 f=0.5 tau=1", "s=4 f=0.5 tau=1 width=0.25"]
    with pytest.raises(InputError, match=r"--cell s=4,tau=3.*s=4 f=0.5 tau=1, s=4"):
        experiments.choose(experiment, cells=["s=4,tau=3"])


def test_records_of_several_widths_live_side_by_side(folder, run):
    words = (
        "paper",
        "small",
        "--folder",
        folder,
        "--cell",
        "s=4,f=0.5,tau=1",
        "--algorithms",
        "fedavg,fedbabu",
    )
    code, printed = run(*words, "--width", "0.5")
    assert (
        code == 0
        and "s=4 f=0.5 tau=1 width=0.5" in printed
        and "printed 97.16" in printed
        and "4 rounds, seed 0" in printed
    )
    code, printed = run(*words, "--width", "0.5")
    assert "2 of 2 records are there" in printed and len(lines(folder)) == 2  # nothing is run again
    assert run(*words, "--rounds", "0.5", "--seeds", "3")[0] == 0
    code, printed = run(*words)
    assert len(lines(folder)) == 6
    for text in (
        "0 of 2 records are there",
        "width=0.5",
        "rounds=0.5",
        "2 rounds, seed 3",
        "4 rounds, seed 0",
    ):
        assert text in printed
    assert printed.count("printed 97.16") == 3  # beside each of them
    assert [r["settings"]["rounds"] for r in lines(folder)] == [4, 4, 2, 2, 4, 4]
    _, printed = run(*words, "--show", "--width", "1")
    assert (
        "4 rounds, seed 0" in printed and printed.count("printed 97.16") == 1
    )  # the full width, asked for, is shown alone
    _, printed = run("paper", "small", "--folder", folder, "--show", "--algorithms", "fedavg")
    assert "1 of 3 records are there" in printed and "width=0.5" in printed
    _, printed = run("paper", "--folder", folder)
    assert (
        "2 of 6" in printed
        and "also recorded: width 0.5" in printed
        and "also recorded: rounds 0.5" in printed
    )


def test_the_command_of_a_scaled_record_makes_it_again(folder, run):
    assert (
        run(
            "paper",
            "small",
            "--folder",
            folder,
            "--cell",
            "tau=2",
            "--width",
            "0.25",
            "--rounds",
            "0.5",
        )[0]
        == 0
    )
    record = lines(folder)[1]
    assert record["command"].endswith(
        "--cell 's=4 f=0.5 tau=2' --algorithms fedavg --seeds 0 --width 0.25 --rounds 0.5"
    )
    (folder / "small/records.jsonl").unlink()
    assert run(*shlex.split(record["command"])[1:], "--folder", folder)[0] == 0
    assert [plain(r) for r in lines(folder)] == [plain(record)]


def test_seeds_are_named_where_they_differ(folder):
    records = [
        {
            "key": {"cell": "c", "variant": variant, "seed": seed},
            "result": {
                "global": {"accuracy": 0.5, "nll": 1.0, "ece": 0.1},
                "dataset": "Digits (again)",
            },
            "settings": {
                "rounds": 5,
                "model": "mobilenet",
                "model.width": 0.25,
                "dataset": "digits",
            },
        }
        for variant, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    settings = {"cells": {"c": {}}, "variants": {"a": {}, "b": {}}}
    found = table.tables(settings, [], records)[0]
    assert found.title == "global prediction: c\nDigits (again), width 0.25, 5 rounds"
    assert [column.header for column in found.columns] == ["", "accuracy", "nll", "ece"]
    assert list(found.columns[1].cells) == ["50.00 ±0.00 (seeds 0,1)", "50.00 (seed 0)"]
    found = table.tables(settings, [], records[:2])[0]
    assert found.title.endswith("5 rounds, seeds 0,1") and list(found.columns[1].cells) == [
        "50.00 ±0.00"
    ]
    other = [{**record, "key": {**record["key"], "cell": "d"}} for record in records[:2]]
    found = table.tables({**settings, "cells": {"c": {}, "d": {}}}, [], records[:2] + other)[0]
    assert found.title == "global prediction: accuracy" and found.columns[2].header.startswith(
        "d\nDigits"
    )


# ---- images that no client has


def test_clean_images_are_predicted_in_the_record(folder, monkeypatch):
    seen = data.load("digits")
    other = Dataset("other", Examples(seen.train.x[:300], seen.train.y[:300]), seen.test, 10)
    monkeypatch.setattr(table.data, "load", lambda name: {"other": other, "digits": seen}[name])
    (folder / "small/settings.toml").write_text('clean = "other"\n' + SETTINGS)
    from fedhb_paper import workbench

    monkeypatch.setattr(workbench, "lacking", lambda settings: {})
    _, now = complete(folder, cells=["s=4 f=0.5 tau=1"])
    found = {r["key"]["variant"]: r for r in now.records}["fedavg"]
    assert found["settings"]["clean"] == "other" and set(found["result"]["clean"]) == {
        "accuracy",
        "nll",
        "brier",
        "ece",
    }
    assert 0.1 < found["result"]["clean"]["accuracy"] <= 1
    _, printed = "", [t.title for t in table.tables(now_settings(folder), [], now.records)]
    assert any("which no client has: " in str(title) for title in printed)
    (folder / "small/settings.toml").write_text(SETTINGS)
    experiment = experiments.load(folder, "small")
    stale = workbench.standing(
        experiment, experiments.choose(experiment, cells=["s=4 f=0.5 tau=1"])
    ).stale
    assert [record["stale"] for record in stale] == [["clean"]] * 2


def now_settings(folder):
    return experiments.load(folder, "small").settings


def test_clean_metrics_are_those_of_the_whole_set_in_batches():
    """A prediction that depends on its batch is made in batches of 128 drawn from all images, and
    every image counts once.
    """
    sizes = []

    class Run:
        class problem:
            class network:
                device = "cpu"

            class likelihood:
                @staticmethod
                def metrics(prediction, y):
                    return {"accuracy": (prediction == y).double().mean().item(), "count": len(y)}

        class algorithm:
            @staticmethod
            def predict(problem, server, x, rng):
                sizes.append(len(x))
                return x[:, 0]

        class state:
            server = None

        rng = None

    x = np.arange(1000).reshape(-1, 1)
    y = np.where(
        np.arange(1000) < 250, np.arange(1000), -1
    )  # sorted: batches in their order would be all right or all wrong
    found = clean_images.metrics(Run(), Dataset("d", Examples(x, y), Examples(x[:0], y[:0]), 10))
    assert found == {"accuracy": 0.25, "count": 1000} and sizes == [128] * 7 + [104]
    assert torch.get_num_threads() >= 1 and json.dumps(found)
