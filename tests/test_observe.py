"""What a run records for its report: right numbers, small, and none of the result's changed by it."""

from __future__ import annotations

import json
import math

import builders
import finished
import numpy as np
import pytest
import torch

import fedhb
from fedhb.clients.clients import Clients
from fedhb.clients.partition import shards
from fedhb.evaluation.observer import count_labels, rounded, shuffled
from fedhb.evaluation.sketch import WIDTH, Sketch
from fedhb.evaluation.uncertainty import BINS, auroc, describe, entropies, judge, together
from fedhb.likelihood import Categorical, GaussianRegression, calibration_error
from fedhb.runs.from_settings import make_clients
from fedhb.runs.settings import Settings

QUICK = {
    "rounds": 2,
    "fraction": 0.5,
    "batch_size": 20,
    "personal_epochs": 1,
    "progress": False,
    "workers": 1,
}


@pytest.fixture(scope="module")
def clients():
    return shards(fedhb.data.load("digits"), num_clients=6, shards_per_client=3, seed=1)


def fit(clients, algorithm, out, **more):
    with builders.seeded():
        model = fedhb.nets.mlp((1, 8, 8), 10, hidden=8)
    return fedhb.fit(model, clients, algorithm, out=out, **QUICK, **more)


def evaluation(path):
    return json.loads((path / "evaluation.json").read_text())


def test_a_result_does_not_depend_on_what_is_recorded(clients, tmp_path):
    for algorithm in (fedhb.NIW(), fedhb.Mixture(), fedhb.FedEM()):
        kept, plain = (
            fit(clients, algorithm, tmp_path / algorithm.name),
            fit(clients, algorithm, None),
        )
        for key in ("global", "personalised", "per_client"):
            assert kept.result[key] == plain.result[key]


def test_every_client_and_every_metric_is_there(clients, tmp_path):
    run = fit(clients, fedhb.NIW(), tmp_path / "x")
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


def test_the_layers_of_niw_and_the_prototypes_of_a_mixture(clients, tmp_path):
    run = fit(clients, fedhb.NIW(), tmp_path / "niw")
    found = evaluation(tmp_path / "niw")["posterior"]
    u = run.state.server["V0"].double() / (run.problem.federation.num_examples + 3)
    assert found["prior_deviation"] == pytest.approx(u.sqrt().tolist(), rel=1e-4)
    assert len(found["spread"]) == len(run.problem.network.body_slots) and min(found["spread"]) > 0
    mixture = fit(clients, fedhb.Mixture(num_prototypes=3), tmp_path / "mixture")
    found = evaluation(tmp_path / "mixture")["posterior"]
    for key in ("responsibilities", "gate"):
        assert np.sum(found[key], axis=1) == pytest.approx(np.ones(6), abs=1e-3)
    r = mixture.state.server["r"]
    assert found["distances"][0][1] == pytest.approx((r[0] - r[1]).norm().item(), rel=1e-3)
    x, y = clients.test.x[clients.test.rows], clients.test.y[clients.test.rows]
    alone = mixture.problem.network.outputs(
        mixture.algorithm.prototypes(mixture.problem, mixture.state.server), x.expand(3, *x.shape)
    )
    right = (alone.argmax(-1) == y)[1, y == 4].double().mean().item()
    assert found["prototype_accuracy"][1][4] == pytest.approx(right, rel=1e-4)


def test_the_spread_is_that_of_the_personal_models(clients, tmp_path):
    run = fit(clients, fedhb.FedAvg(), tmp_path / "x")
    server, plan = run.state.server, run.personal_plan
    personal = run.algorithm.personalise(run.problem, server, clients, {}, plan, run.rng).theta[
        :, 0
    ]
    slot = run.problem.network.body_slots[0]
    deviation = (
        personal[:, slot.start : slot.stop].double().var(0, correction=0).mean().sqrt().item()
    )
    assert evaluation(tmp_path / "x")["posterior"]["spread"][0] == pytest.approx(
        deviation, rel=1e-3
    )


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


def test_bins_of_reliability_give_the_calibration_error():
    p = torch.softmax(3 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0)), -1)
    y = torch.randint(5, (400,), generator=torch.Generator().manual_seed(1))
    bins = describe(
        together(
            [
                judge(Categorical(5), part, y[k])
                for k, part in zip(torch.arange(400).split(90), p.split(90), strict=True)
            ]
        )
    )
    gaps = np.abs(np.array(bins["reliability"]["right"]) - bins["reliability"]["confidence"])
    assert gaps.sum() / 400 == pytest.approx(calibration_error(p, y)) and len(gaps) == BINS


def test_rejection_removes_the_least_certain_first():
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.55, 0.45]])
    found = describe(judge(Categorical(2), p, torch.tensor([0, 1, 0, 1])))[
        "rejection"
    ]  # wrong where it is unsure
    at = dict(zip(found["rejected"], found["accuracy"], strict=True))
    assert (at[0.0], at[0.25], at[0.5]) == (0.5, pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_coverage_of_exact_intervals_is_their_level(count):
    y = torch.randn(20_000, count, generator=torch.Generator().manual_seed(0))
    prediction = torch.stack([torch.zeros(20_000, count), torch.ones(20_000, count)], dim=1)
    likelihood = GaussianRegression(num_targets=count)
    found = describe(
        together([judge(likelihood, prediction[k], y[k]) for k in torch.arange(20_000).split(6000)])
    )["coverage"]
    assert found["held"][17] == pytest.approx(
        likelihood.metrics(prediction, y)["coverage"], abs=1e-9
    )
    assert (
        np.abs(np.array(found["held"]) - found["level"]).max() < 0.018
    )  # five standard errors of a share of 20,000


def test_entropy_tells_apart():
    sure, unsure = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[0.5, 0.5]] * 6)
    found = entropies(judge(Categorical(2), sure), judge(Categorical(2), unsure), "x", math.log(2))
    assert found["auroc"] == 1.0 and found["familiar"][0] == 1.0 and found["unseen"][-1] == 1.0
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5


def test_sketches_keep_distances_and_come_from_the_seed():
    theta = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    theta[4:] += torch.tensor([0.5, 1.0, 2.0, 4.0]).unsqueeze(
        1
    )  # whole vectors apart: only signs keep these from adding up
    found = Sketch(5000, 3, torch.device("cpu"))(theta)
    ratio = (torch.cdist(found, found) / torch.cdist(theta.double(), theta.double()))[
        ~torch.eye(8, dtype=bool)
    ]
    assert (ratio - 1).abs().max() < 5 / math.sqrt(
        2 * WIDTH
    )  # five standard deviations of a sketched length
    assert torch.equal(found, Sketch(5000, 3, torch.device("cpu"))(theta))
    assert not torch.equal(found, Sketch(5000, 4, torch.device("cpu"))(theta))


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
    ("unseen", "said"), [("10", "no class of digits"), ("nowhere", "unknown data set")]
)
def test_what_cannot_be_unseen_is_refused_before_training(unseen, said, tmp_path):
    with pytest.raises(fedhb.InputError, match=said):
        finished.one(tmp_path / "x", "fedavg", unseen=unseen)
    assert not (tmp_path / "x").exists()
