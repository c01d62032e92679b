"""The numbers that a run records for its report: right, small, without effect on the result."""

from __future__ import annotations

import math

import builders
import numpy as np
import pytest
import torch
from observed_runs import QUICK, evaluation, fit

import fedhb
from fedhb.clients.clients import Clients
from fedhb.clients.partition import shards
from fedhb.evaluation.observer import count_labels, rounded, shuffled
from fedhb.evaluation.sketch import WIDTH


@pytest.fixture(scope="module")
def clients():
    return shards(fedhb.data.load("digits"), num_clients=6, shards_per_client=3, seed=1)


def test_a_result_does_not_depend_on_what_is_recorded(clients, tmp_path):
    for algorithm in (fedhb.EmpiricalBayes(), fedhb.Mixture(), fedhb.FedEM()):
        kept, plain = (
            fit(clients, algorithm, tmp_path / algorithm.name),
            fit(clients, algorithm, None),
        )
        for key in ("global", "personalised", "per_client"):
            assert kept.result[key] == plain.result[key]


def test_every_client_and_every_metric_is_there(clients, tmp_path):
    run = fit(clients, fedhb.EmpiricalBayes(), tmp_path / "x")
    found = evaluation(tmp_path / "x")
    assert found["clients"]["client"] == [0, 1, 2, 3, 4, 5]
    assert (
        np.sum(found["clients"]["labels"]) == clients.num_examples == sum(found["clients"]["sizes"])
    )
    for task in ("global", "personalised"):
        for name, values in found["metrics"][task].items():
            assert np.mean(values) == pytest.approx(run.result[task][name], rel=1e-4)
        parts = found["uncertainty"][task]
        assert parts["examples"] == len(clients.test.rows) == sum(parts["reliability"]["count"])
        right = sum(parts["reliability"]["right"]) / parts["examples"]
        assert parts["rejection"]["accuracy"][0] == pytest.approx(right, rel=1e-4)
        for key in ("familiar", "unseen"):
            assert sum(parts["entropy"][key]) == pytest.approx(1.0, abs=1e-3)
        assert parts["entropy"]["edges"][-1] == pytest.approx(math.log(10), rel=1e-4)
    assert len(found["sketches"]) == 6 and len(found["sketches"][0]) == WIDTH
    assert np.abs(np.mean(found["sketches"], axis=0)).max() < 1e-4
    assert (tmp_path / "x/evaluation.json").stat().st_size < 30_000


def test_unseen_inputs_of_the_users_own(clients, tmp_path):
    noise = np.random.default_rng(0).integers(0, 17, size=(30, 1, 8, 8)).astype(np.uint8)
    fit(clients, fedhb.FedAvg(), tmp_path / "x", unseen=("noise", noise))
    assert evaluation(tmp_path / "x")["uncertainty"]["global"]["entropy"]["what"] == "noise"
    with pytest.raises(fedhb.InputError, match="shape"):
        fit(clients, fedhb.FedAvg(), tmp_path / "y", unseen=("noise", noise[:, :, 1:]))
    assert not (tmp_path / "y").exists()


def test_regression_has_coverage_instead_of_confidence(tmp_path):
    rng = np.random.default_rng(0)
    pairs = [
        (x := rng.normal(size=(30, 2)), x @ [1.0, 2.0] + 0.1 * rng.normal(size=30))
        for _ in range(4)
    ]
    run = fedhb.fit(
        torch.nn.Linear(2, 2),
        Clients.from_arrays(pairs, pairs),
        fedhb.FedAvg(),
        out=tmp_path / "x",
        **QUICK,
    )
    parts = evaluation(tmp_path / "x")["uncertainty"]["global"]
    assert parts["coverage"]["held"][17] == pytest.approx(
        run.result["global"]["coverage"], abs=1e-4
    )  # equal clients: the same mean
    assert len(parts["rejection"]["rmse"]) == len(parts["rejection"]["rejected"])
    assert evaluation(tmp_path / "x")["clients"]["labels"] is None


def test_labels_are_counted_for_a_selection():
    some = Clients.from_arrays(builders.arrays())
    counts = count_labels(some.select([2, 0]))
    assert counts.sum(1).tolist() == [12, 7]
    assert (
        counts[1].tolist()
        == np.bincount(builders.arrays()[0][1], minlength=builders.CLASSES).tolist()
    )


def test_shuffled_inputs_keep_the_values_of_each_image_or_column(clients):
    _, x = shuffled(clients.test, 0)
    assert sorted(map(int, x.sum((1, 2, 3)))) == sorted(
        map(int, clients.test.x[clients.test.rows].sum((1, 2, 3)))
    )
    table = Clients.from_arrays(builders.arrays(), builders.arrays()).test
    _, mixed = shuffled(table, 0)
    assert torch.allclose(mixed.sort(0).values, table.x.sort(0).values)
    assert not torch.allclose(mixed, table.x)


def test_rounded_leaves_no_infinity():
    assert rounded({"a": [1.23456789, float("nan"), 3], "b": "x"}) == {
        "a": [1.2346, None, 3],
        "b": "x",
    }
