"""A federation of nodes ends where the simulator does: the same posterior, the same metrics, the
same files.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from loopback import close, federation, small

from fedhb.algorithms import ALGORITHMS
from fedhb.answers.admission import Lengths
from fedhb.answers.privacy import Private
from fedhb.errors import InputError
from fedhb.flower.server_app import serve
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.load import load

CASES = {name: {} for name in ALGORITHMS if name != "centralised"} | {
    "empirical-bayes-last": {"empirical-bayes": {"begin": "last"}},
    "empirical-bayes-defended": {"defence": "default", "fraction": 1.0},
    "mixture-defended": {"defence": "refuse,clip,winsorise,krum", "fraction": 1.0},
}


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_ends_where_the_simulator_does(tmp_path, case):
    settings = small(case.removesuffix("-last").removesuffix("-defended"), **CASES[case])
    simulated = train(settings, tmp_path / "simulated", progress=False)
    run = serve(*federation(settings, tmp_path / "flower"))
    close(run.state.server, simulated.state.server, case)
    assert run.result.keys() == simulated.result.keys()
    for task in ("global", "personalised"):
        assert run.result[task] == pytest.approx(
            simulated.result[task], abs=2e-2
        )  # of 40 test examples a client
    assert run.result["communication"] == simulated.result["communication"]
    assert run.result["data"] == simulated.result["data"]
    assert run.result["per_client"].keys() == simulated.result["per_client"].keys()
    names = {path.name for path in (tmp_path / "flower").iterdir()}
    simulators = {path.name for path in (tmp_path / "simulated").iterdir()}
    assert names >= simulators - {
        "evaluation.json"
    }  # which tells of the clients' labels and predictions: they stay on the nodes
    ours, theirs = run.records, simulated.records
    assert [r["round"] for r in ours] == [1, 2, 3]
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)
    assert ours[0].keys() - theirs[0].keys() == {"answered", "attempts", "node_seconds"}


def test_a_run_on_flower_is_loaded_like_any_other(tmp_path):
    run = serve(*federation(small("empirical-bayes"), tmp_path / "out"))
    loaded = load(tmp_path / "out")
    x = np.random.default_rng(0).uniform(0, 16, size=(3, 1, 8, 8)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(x), run.predict(x))
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "done"


def test_a_client_personalises_as_its_node_did(tmp_path, monkeypatch):
    """The server's run knows that inputs are cropped and flipped, and so does its folder."""
    monkeypatch.setattr("fedhb.clients.clients.AUGMENTED", ("digits",))
    settings = small("fedavg")
    run = serve(*federation(settings, tmp_path / "out"))
    clients, _ = make_clients(settings)
    (x, y), (x_test, y_test) = clients.train.examples(2), clients.test.examples(2)
    for one in (run, load(tmp_path / "out")):
        assert one.augment == clients.augment == "crop-flip"
        prediction = torch.from_numpy(one.personalise(x, y, client=2).predict(x_test))
        found = one.problem.likelihood.metrics(prediction, y_test)
        assert found["accuracy"] == run.result["per_client"]["personalised_accuracy"][2]


def test_holdout_and_validation_are_the_simulators(tmp_path):
    settings = small("fedavg", holdout_clients=1, validation=0.2, evaluate_on="validation")
    simulated = train(settings, tmp_path / "simulated", progress=False)
    run = serve(*federation(settings, tmp_path / "flower"))
    close(run.state.server, simulated.state.server, "fedavg")
    assert run.result["split"] == "validation"
    assert (
        run.result["holdout"]["per_client"]["client"]
        == simulated.result["holdout"]["per_client"]["client"]
    )
    assert run.result["holdout"]["global"] == pytest.approx(
        simulated.result["holdout"]["global"], abs=2e-2
    )


def test_pooling_is_refused(tmp_path):
    grid, chosen = federation(small("centralised"), tmp_path / "out")
    with pytest.raises(InputError, match="centralised"):
        serve(grid, chosen)


@pytest.mark.parametrize("algorithm", ["empirical-bayes", "mixture"])
def test_a_private_run_is_the_simulators_too(tmp_path, algorithm, monkeypatch):
    """With the same secret the same noise, on Flower as in one process, and the same epsilon."""
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(
        Private, "mark", lambda self, summary: ""
    )  # else noise follows from the rounding of the sums too
    # by the lengths of others' answers, one client could decide who else counts
    monkeypatch.setattr(
        Lengths, "check", lambda self, found: pytest.fail("an answer may be refused for its length")
    )
    settings = small(algorithm, dp_noise=0.2, dp_clip=0.5)
    for name in ("simulated", "flower"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "noise.key").write_bytes(b"s" * 32)
    simulated = train(settings, tmp_path / "simulated", progress=False)
    run = serve(*federation(settings, tmp_path / "flower"))
    close(run.state.server, simulated.state.server, algorithm)
    assert (
        run.result["privacy"] == simulated.result["privacy"]
        and run.result["privacy"]["epsilon"] > 0
    )
