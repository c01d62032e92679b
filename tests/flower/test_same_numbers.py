"""A federation of nodes ends where the simulator does: the same posterior, the same metrics, the same files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from loopback import FIRST, Loopback, close, config, federation, small

from fedhb.algorithms import ALGORITHMS
from fedhb.answers.admission import Lengths
from fedhb.answers.privacy import Private
from fedhb.errors import InputError
from fedhb.flower.census import Census, Facts, Moments
from fedhb.flower.federated_task import Task
from fedhb.flower.node import load as load_node
from fedhb.flower.server_app import serve
from fedhb.likelihood import CALM, GaussianRegression
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.load import load

CASES = {name: {} for name in ALGORITHMS if name != "centralised"} | {
    "niw-last": {"niw": {"begin": "last"}},
    "niw-defended": {"defence": "default", "fraction": 1.0},
    "mixture-defended": {"defence": "refuse,clip,winsorise,krum", "fraction": 1.0},
    "niw-printed": {"niw": {"dof": "full", "kl_weight": 1e-4, "update": "body"}},
}


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_ends_where_the_simulator_does(tmp_path, case):
    settings = small(case.partition("-")[0], **CASES[case])
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
    run = serve(*federation(small("niw"), tmp_path / "out"))
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
    with pytest.raises(InputError, match="pools its clients' data"):
        serve(grid, chosen)


def own_files(folder, regression: int):
    """Four owners' files, and the same data as one file with a column `client`: labels, one real target, or three."""
    rng, parts = np.random.default_rng(3), []
    for k in range(4):
        n = 30 + 7 * k
        x = rng.normal(loc=k, scale=1 + k, size=(n, 5)).astype(np.float32)
        y = (
            (x[:, 0] * 2 + rng.normal(size=n)).astype(np.float32)
            if regression
            else rng.integers(0, 3, n)
        )
        y = (
            np.stack([y, 1000 - 300 * x[:, 1], np.full_like(y, 0.1)], axis=1)
            if regression > 1
            else y
        )
        split = ((np.arange(n) % 5 == 0) & (k != 2)).astype(np.int64)  # client 2 has no test rows
        np.savez(folder / f"{k}.npz", x=x, y=y, split=split)
        parts.append((x, y, split, np.full(n, k)))
    x, y, split, client = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    np.savez(folder / "all.npz", x=x, y=y, split=split, client=client)


@pytest.mark.parametrize("regression", [0, 1, 3])
def test_nodes_with_their_own_files_agree_by_sums_alone(tmp_path, regression):
    """Scaling, classes and the units of the targets come from moments; the numbers are those of one pooled file."""
    own_files(tmp_path, regression)
    settings = small("niw", data=str(tmp_path / "all.npz"))
    simulated = train(settings, tmp_path / "simulated", progress=False)
    chosen = config(replace(settings, data=""), tmp_path / "flower")
    grid = Loopback(
        [{"partition-id": k, "data": str(tmp_path / f"{k}.npz")} for k in range(4)], chosen
    )
    run = serve(grid, chosen)
    close(run.state.server, simulated.state.server, "own files")
    scaling, theirs = run.problem.network.scaling, simulated.problem.network.scaling
    torch.testing.assert_close(scaling.mean, theirs.mean)
    torch.testing.assert_close(scaling.std, theirs.std)
    assert run.result["global"] == pytest.approx(simulated.result["global"], rel=1e-3, abs=2e-2)
    missing = [[value is None for value in r.result["per_client"][f"global_{'rmse' if regression else 'accuracy'}"]]
               for r in (run, simulated)]  # fmt: skip
    assert missing == [[False, False, True, False]] * 2
    if regression:
        ours, others = (r.problem.likelihood for r in (run, simulated))
        assert (
            isinstance(ours.scale, float if regression == 1 else tuple)
            and ours.num_targets == others.num_targets
        )
        for key in ("centre", "scale"):
            assert np.ravel(getattr(ours, key)) == pytest.approx(
                np.ravel(getattr(others, key)), rel=1e-12
            )


def test_the_moments_of_every_target_are_needed(tmp_path):
    own_files(tmp_path, 3)
    facts = Facts.of(load_node(small("niw"), {"partition-id": 0, "data": str(tmp_path / "0.npz")}))
    census = Census.of([Facts.read(facts.to_json())])
    assert (
        Census.read(census.to_json()) == census
        and len(census.targets[0]) == len(census.targets[1]) == 3
    )
    few = replace(
        facts,
        targets=Moments(facts.targets.count, facts.targets.mean[:1], facts.targets.scatter[:1]),
    )
    with pytest.raises(
        ValueError, match="moments of 1 of 3 targets: install the server's version of fedhb"
    ):
        Facts.read(few.to_json())


def test_a_federation_with_one_scale_for_all_targets_is_resumed_with_it(tmp_path):
    """As census.json had it once: the same text, so the same fingerprint, and the same likelihood."""
    own_files(tmp_path, 3)
    facts = Facts.of(load_node(small("niw"), {"partition-id": 0, "data": str(tmp_path / "0.npz")}))
    old = replace(Census.of([facts]), targets=(2.0, 5.0))
    assert Census.read(old.to_json()).to_json() == old.to_json()
    likelihood = Task.of(small("niw"), Census.read(old.to_json())).problem.likelihood
    assert likelihood == GaussianRegression(3, centre=2.0, scale=5.0, **CALM)


def test_a_file_that_nodes_share_is_partitioned(tmp_path):
    own_files(tmp_path, 0)
    settings = small("fedavg", data=str(tmp_path / "all.npz"))
    simulated = train(settings, tmp_path / "simulated", progress=False)
    chosen = config(settings, tmp_path / "flower")
    grid = Loopback(
        [{"partition-id": k, "shared": str(tmp_path / "all.npz")} for k in range(4)], chosen
    )
    close(serve(grid, chosen).state.server, simulated.state.server, "shared file")


def patients(client, settings):
    """An owner's function."""
    rng = np.random.default_rng(client)
    return (rng.normal(size=(20, 4)), rng.integers(0, 2, 20)), None


def test_data_from_a_function_without_test_examples(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "owners.py").write_text("from test_same_numbers import patients\n")
    chosen = config(small("mixture"), tmp_path / "out")
    run = serve(
        Loopback([{"partition-id": k, "data": "owners:patients"} for k in range(4)], chosen), chosen
    )
    assert run.result["global"] is None and run.result["split"] is None
    assert run.problem.federation.num_examples == 80 and run.problem.federation.num_classes == 2


def test_the_run_cannot_choose_a_nodes_file(tmp_path):
    own_files(tmp_path, 0)
    grid, chosen = federation(
        small("niw", data=str(tmp_path / "all.npz")), tmp_path / "out", patience=0.05
    )
    with pytest.raises(InputError, match="only 0 of 4 nodes"):
        serve(grid, chosen)
    events = [
        json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    ]
    assert {e["node"] for e in events} == set(range(FIRST, FIRST + 4))
    assert "is not this node's" in events[0]["detail"]


def test_nodes_that_do_not_fit_together_are_named(tmp_path):
    own_files(tmp_path, 0)
    np.savez(tmp_path / "odd.npz", x=np.zeros((9, 7), np.float32), y=np.arange(9) % 3)
    chosen = config(small("niw"), tmp_path / "out")
    files = ["0.npz", "1.npz", "2.npz", "odd.npz"]
    grid = Loopback(
        [{"partition-id": k, "data": str(tmp_path / f)} for k, f in enumerate(files)], chosen
    )
    with pytest.raises(InputError, match=r"client 0 has input_shape=\(5,\), client 3 \(7,\)"):
        serve(grid, chosen)


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


@pytest.mark.parametrize("algorithm", ["niw", "mixture"])
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
