"""Which runs are one method: those that differ in their seed alone, in what they were trained on too. And the words for them."""

from __future__ import annotations

import json
import shutil

import finished
import numpy as np
import pytest
import torch

import fedhb
from fedhb.report import run_data, summary_section
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings


def table(path, seed):
    """A file of four clients' own."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        x=rng.normal(size=(160, 3)).astype(np.float32),
        y=rng.integers(0, 2, 160),
        client=np.repeat([*"abcd"], 40),
    )
    return path


def own(file, out, seed=0):
    """A run on it."""
    flags = {"algorithm": "fedavg", "data": str(file), "rounds": 1, "seed": seed}
    train(
        Settings.resolve(finished.SMALL | {"model": {"name": "mlp", "hidden": 4}}, flags),
        out,
        progress=False,
    )
    return out


def fitted(out, hidden, seed, examples=20, evaluate_on="test"):
    """A run from Python, whose settings tell of arrays and a class alone."""
    rng = np.random.default_rng(0)
    shares = [
        (rng.normal(size=(examples, 3)).astype(np.float32), rng.integers(0, 2, examples))
        for _ in range(3)
    ]
    model = torch.nn.Sequential(
        torch.nn.Linear(3, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)
    )
    clients = fedhb.Clients.from_arrays(shares, shares)
    fedhb.fit(
        model,
        clients,
        fedhb.FedAvg(),
        rounds=1,
        seed=seed,
        out=out,
        progress=False,
        workers=1,
        evaluate_on=evaluate_on,
    )
    return out


def names(*paths):
    return [method.name for method in run_data.read(paths)]


def test_other_data_are_another_method(tmp_path):
    a = own(table(tmp_path / "patients.npz", 0), tmp_path / "a", seed=0)
    b = own(table(tmp_path / "other.npz", 1), tmp_path / "b", seed=1)
    assert names(a, b) == ["fedavg dataset=patients", "fedavg dataset=other"]


def test_data_are_told_by_their_content_not_by_their_path(tmp_path):
    a = own(table(tmp_path / "one/patients.npz", 0), tmp_path / "a", seed=0)
    b = own(table(tmp_path / "two/patients.npz", 0), tmp_path / "b", seed=1)
    c = own(table(tmp_path / "three/patients.npz", 1), tmp_path / "c", seed=2)
    assert [[run.path.name for run in method.runs] for method in run_data.read([a, b, c])] == [
        ["a", "b"],
        ["c"],
    ]
    assert names(a, b, c) == ["fedavg (a)", "fedavg (c)"]
    (c / "result.json").unlink()
    assert names(a, c) == ["fedavg"]  # not finished: nothing tells that it is other data


@pytest.mark.parametrize("evaluate_on", ["test", None])
def test_another_network_or_more_arrays_are_another_method(tmp_path, evaluate_on):
    a = fitted(tmp_path / "a", 4, 0, evaluate_on=evaluate_on)
    assert names(a, fitted(tmp_path / "b", 4, 1, evaluate_on=evaluate_on)) == ["fedavg"]
    assert names(a, fitted(tmp_path / "c", 8, 1, evaluate_on=evaluate_on)) == [
        "fedavg (a)",
        "fedavg (c)",
    ]
    assert names(a, fitted(tmp_path / "d", 4, 1, 30, evaluate_on=evaluate_on)) == [
        "fedavg (a)",
        "fedavg (d)",
    ]


def test_a_seed_is_in_a_method_once(tmp_path):
    for seed in (0, 1):
        finished.one(tmp_path / f"x/fedavg-seed{seed}", "fedavg", rounds=1, seed=seed)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    methods = run_data.read([tmp_path / "x", tmp_path / "y"])
    assert [method.name for method in methods] == [
        "fedavg (x/fedavg-seed0)",
        "fedavg (y/fedavg-seed0)",
    ]
    assert [[run.path.parent.name for run in method.runs] for method in methods] == [
        ["x", "x"],
        ["y", "y"],
    ]


def test_the_sentence_and_the_settings_of_own_data(tmp_path):
    path = own(table(tmp_path / "patients.npz", 0), tmp_path / "r")
    for _ in range(2):
        methods = run_data.read([path])
        assert (
            "fedavg trained on patients, held by 4 clients, 2 of them in each of 1 round"
            in summary_section.sentence(methods)
        )
        settings = summary_section.settings_table(methods)
        assert (
            "<code>dataset</code></th><td>patients</td>" in settings
            and "<code>num_clients</code></th><td>4</td>" in settings
        )
        (path / "result.json").unlink(missing_ok=True)
        (path / "evaluation.json").unlink(
            missing_ok=True
        )  # once more, as it was before it was evaluated
    (path / "problem.json").unlink()
    assert "held by" not in summary_section.sentence(run_data.read([path]))


def test_the_data_of_nodes_are_not_said_to_be_dealt(tmp_path):
    path = finished.one(tmp_path / "r", "fedavg", rounds=1)
    result = json.loads((path / "result.json").read_text()) | {"dataset": "nodes"}
    shutil.rmtree(path / "checkpoint")
    (path / "result.json").write_text(json.dumps(result))
    assert "trained on nodes, held by 8 clients, 4 of them" in summary_section.sentence(
        run_data.read([path])
    )


def test_clients_are_all_that_train_and_cohorts_as_they_are_drawn(tmp_path):
    path = finished.one(tmp_path / "r", "fedavg", rounds=1, num_clients=100, fraction=0.29)
    result = json.loads((path / "result.json").read_text())
    result["per_client"] = {
        key: values[:7] for key, values in result["per_client"].items()
    }  # the others have no test examples
    shutil.rmtree(path / "checkpoint")
    (path / "result.json").write_text(json.dumps(result))
    (path / "evaluation.json").unlink()
    assert (
        "held by 100 clients with at most 3 classes each, 29 of them"
        in summary_section.sentence(run_data.read([path]))
    )
