"""The federation of CIFAR-100-C from files to the printed table, on a few images."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from small_experiment import lines, write

from fedhb.data.corruptions import CORRUPTIONS
from fedhb.runs.run_grid import _dataset_of
from fedhb_paper import experiments, table
from fedhb_paper.scale import Scale

IMAGES, CLASSES = 100, 5
SETTINGS = """
title = "corrupted"
kind = "table"
seeds = [0]
clean = "cifar-100"
[common]
dataset = "cifar-100-c"
num_clients = 10
holdout_clients = 9
shards_per_client = 5
fraction = 0.5
rounds = 10
batch_size = 30
lr = 0.02
personal_epochs = 1
model = {name = "mlp", hidden = 16}
[cells.all]
[variants]
fedavg = {}
"""
PRINTED = """cell,algorithm,task,metric,mean,std
all,fedavg,global,accuracy,70.01,0.77
all,fedavg,clean,accuracy,33.33,
all,fedavg,holdout_personalised,accuracy,66.66,1.00
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """CIFAR-100 and CIFAR-100-C in which a picture's red says its class."""
    monkeypatch.setenv("FEDHB_DATA", str(tmp_path))
    _dataset_of.cache_clear()
    labels, rng = np.arange(IMAGES) % CLASSES, np.random.default_rng(0)
    (tmp_path / "cifar-100").mkdir()
    (tmp_path / "CIFAR-100-C").mkdir()
    records = rng.integers(0, 40, size=(IMAGES, 3074)).astype(np.uint8)
    records[:, 0], records[:, 1] = 0, labels
    records[:, 2:1026] += (40 * labels[:, None]).astype(np.uint8)
    for name in ("train.bin", "test.bin"):
        records.tofile(tmp_path / "cifar-100" / name)
    images = records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    for name in CORRUPTIONS:
        np.save(tmp_path / f"CIFAR-100-C/{name}.npy", np.tile(images, (5, 1, 1, 1)))
    np.save(tmp_path / "CIFAR-100-C/labels.npy", np.tile(labels, 5))
    return tmp_path


def test_the_table_has_the_three_tasks_beside_the_printed_numbers(files, run):
    folder = write(files / "experiments", SETTINGS, printed=PRINTED)
    code, printed = run("paper", "small", "--folder", folder)
    assert code == 0
    (record,) = lines(folder)
    result = record["result"]
    assert result["dataset"] == "CIFAR-100-C" and list(result["data"]) == [
        "cifar-100-c, severity 5"
    ]
    assert {"global", "clean", "personalised", "holdout_global", "holdout_personalised"} <= set(
        result
    )
    for task, value in (
        ("global", "70.01 ±0.77"),
        ("clean", "33.33"),
        ("holdout_personalised", "66.66 ±1.00"),
    ):
        assert f"{100 * result[task]['accuracy']:.2f}" in printed and f"printed {value}" in printed
    assert result["clean"]["accuracy"] > 0.4  # the same pictures: what was learnt of them holds
    assert "CIFAR-100-C, 10 rounds, seed 0" in printed
    assert (
        record["settings"]["group_split"] == "image" and record["settings"]["clean"] == "cifar-100"
    )


def test_images_that_others_train_on_are_known_under_every_corruption(files, run):
    """Classes without any rule can only be learnt by heart: what tells a split that leaks from one
    that does not.
    """
    bands = np.random.default_rng(1).integers(0, 256, size=(IMAGES, 4, 1, 3)).astype(np.uint8)
    pictures = np.broadcast_to(
        bands.repeat(8, axis=1), (IMAGES, 32, 32, 3)
    )  # much the same when cropped and flipped
    for name in CORRUPTIONS:
        np.save(files / f"CIFAR-100-C/{name}.npy", np.tile(pictures, (5, 1, 1, 1)))
    changes = (
        ("fraction = 0.5", "fraction = 1.0"),
        ("hidden = 16", "hidden = 64"),
        ("rounds = 10", "rounds = 30"),
        ("lr = 0.02", "lr = 0.1"),
    )
    learnt = reduce(lambda text, change: text.replace(*change), changes, SETTINGS)
    folder = write(files / "experiments", learnt, printed="")
    assert run("paper", "small", "--folder", folder)[0] == 0
    result = lines(folder)[0]["result"]
    assert result["leak"]["known"]["accuracy"] > 0.9 and result["leak"]["novel"]["accuracy"] > 0.9
    assert result["global"]["accuracy"] < 0.6 and result["holdout_global"]["accuracy"] < 0.6
    (shown,) = table.leak_table(lines(folder))
    tasks = (
        result["global"],
        result["leak"]["known"],
        result["holdout_global"],
        result["leak"]["novel"],
    )
    assert [next(column.cells) for column in shown.columns[2:]] == [
        f"{100 * task['accuracy']:.2f}" for task in tasks
    ]

    leaking = write(
        files / "leaking", learnt.replace("[common]", '[common]\ngroup_split = "group"'), printed=""
    )
    assert run("paper", "small", "--folder", leaking)[0] == 0
    result = lines(leaking)[0]["result"]
    assert (
        "leak" not in result and result["global"]["accuracy"] > 0.6
    )  # nothing to foretell: the test itself leaks


def test_what_is_missing_is_said_before_it_runs(files, run):
    folder = write(files / "experiments", SETTINGS, printed="")
    (files / "cifar-100/train.bin").rename(files / "train.away")
    code, printed = run("paper", "small", "--folder", folder)
    assert code == 2 and "data set cifar-100:" in printed
    (files / "CIFAR-100-C/fog.npy").unlink()
    code, printed = run("paper", "small", "--folder", folder)
    assert code == 2 and "`fedhb data make cifar-100-c`" in printed


REPOSITORY = Path(__file__).parents[2] / "experiments"
CIFAR = [name for name in experiments.names(REPOSITORY) if name.startswith("cifar_")]
ALSO = ["sensitivity_k", "sensitivity_p_drop", "ensembles"]
"""Experiments of which one cell is CIFAR-100, in the paper's setting."""


@pytest.mark.parametrize("name", [*CIFAR, *ALSO])
def test_the_cifar_experiments_have_fedbabus_protocol(name):
    """docs/deviations.md, Protocol: the values of FedBABU's scripts, whatever an algorithm was
    tuned to elsewhere.
    """
    experiment = experiments.load(REPOSITORY, name)
    for key in experiments.choose(experiment, datasets=["cifar-100"] if name in ALSO else []):
        found = experiment.resolved(key)
        named = dict(
            part.split("=")
            for part in (key["cell"] if name in CIFAR else "s=100 f=0.1 tau=1").split()
        )
        own = [found[field] for field in ("shards_per_client", "fraction", "local_epochs")]
        assert own == [int(named["s"]), float(named["f"]), int(named["tau"])]
        assert (
            found["rounds"] == 320 // found["local_epochs"]
            and found["model"] == "mobilenet"
            and found["num_clients"] == 100
        )
        plan = {
            name: found[name]
            for name in (
                "batch_size",
                "lr",
                "momentum",
                "schedule",
                "personal_lr",
                "personal_epochs",
            )
        }
        assert (
            list(plan.values()) == [50, 0.1, 0.9, "step", 1e-3, 5]
            and found["batch_norm"] == "batch"
        )
        if name.startswith("cifar_c"):
            corrupted, copies = (
                name in ("cifar_c", "cifar_c_more_k", "cifar_c_copies"),
                "split" in key["variant"],
            )
            assert (found["dataset"] == "cifar-100-c") == corrupted == ("clean" in found)
            assert found["holdout_clients"] == (99 if corrupted else 0)
            assert found["group_split"] == ("group" if copies else "image")


def test_the_printed_numbers_are_of_cells_and_variants_that_there_are():
    tasks = set(table.NAMES)
    for name in CIFAR:
        experiment = experiments.load(REPOSITORY, name)
        for row in experiment.printed():
            assert (
                row["cell"] in experiment.settings["cells"]
                and row["algorithm"] in experiment.settings["variants"]
            )
            assert row["task"] in tasks


def test_a_cell_is_named_by_its_parts():
    experiment = experiments.load(REPOSITORY, "cifar_body").scaled([Scale(0.25)])
    keys = experiments.choose(
        experiment, cells=["s=100,f=0.1,tau=1"], algorithms=["niw", "fedbabu"]
    )
    assert {key["cell"] for key in keys} == {"s=100 f=0.1 tau=1 width=0.25"} and len(keys) == 2 * 3
    assert experiment.resolved(keys[0])["model.width"] == 0.25
