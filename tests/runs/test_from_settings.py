"""From settings to clients, a model and a run."""

from __future__ import annotations

import json
import numpy as np
import pytest
from fedhb.clients import partition
from fedhb.clients.partition import shards
from fedhb.errors import InputError
from fedhb.runs.from_settings import make_clients
from fedhb.runs.settings import Settings
from hypothesis import given
from partitions import grouped
import fedhb
import finished


def test_the_settings_know_the_splits():
    from fedhb.runs import settings as given

    assert given.SPLITS == partition.SPLITS


def test_clients_of_a_grouped_data_set_come_from_its_groups():
    from fedhb.runs.from_settings import make_clients
    from fedhb.runs.settings import Settings

    chosen = Settings(
        num_clients=12, holdout_clients=10, shards_per_client=5, max_examples=7, validation=0.2
    )
    clients, novel = make_clients(chosen, grouped())
    assert len(clients) == 12 and len(novel) == 10
    for who in (clients, novel):
        assert (who.train.sizes + who.validation.sizes == 7).all()
    for wrong, message in ({"partition": "iid"}, "iid"), ({"server_share": 0.1}, "server_share"):
        with pytest.raises(InputError, match=message):
            make_clients(Settings(**wrong), grouped())


@pytest.fixture(scope="module")
def clients():
    return shards(fedhb.data.load("digits"), num_clients=6, shards_per_client=3, seed=1)


def evaluation(path):
    return json.loads((path / "evaluation.json").read_text())


def test_a_class_is_left_out_of_training_and_test_and_called_unseen(tmp_path):
    path = finished.one(tmp_path / "x", "fedavg", unseen="3")
    found = evaluation(path)
    assert (
        np.sum(found["clients"]["labels"], axis=0)[3]
        == 0
        < np.sum(found["clients"]["labels"], axis=0)[4]
    )
    assert found["uncertainty"]["global"]["entropy"]["what"] == "class 3, which no client has"
    plain = make_clients(Settings.resolve(finished.SMALL, {}))[0]
    without = make_clients(Settings.resolve(finished.SMALL | {"unseen": "3"}, {}))[0]
    assert not (without.test.y[without.test.rows] == 3).any()
    assert len(without.train.rows) == (plain.train.y[plain.train.rows] != 3).sum()


def test_another_file_is_unseen(tmp_path):
    x = np.random.default_rng(0).integers(0, 17, size=(40, 1, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "noise.npz", x=x, y=np.arange(40) % 2)
    found = evaluation(finished.one(tmp_path / "x", "fedavg", unseen=str(tmp_path / "noise.npz")))
    assert found["uncertainty"]["global"]["entropy"]["what"] == "noise"


@pytest.mark.parametrize(
    ("unseen", "said"), [("10", "digits"), ("nowhere", "data set")]
)
def test_what_cannot_be_unseen_is_refused_before_training(unseen, said, tmp_path):
    with pytest.raises(fedhb.InputError, match=said):
        finished.one(tmp_path / "x", "fedavg", unseen=unseen)
    assert not (tmp_path / "x").exists()
