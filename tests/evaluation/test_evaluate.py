"""Global and personalised metrics, client by client, on examples that nobody trains on."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import CASES, CLASSES, FEATURES, NETWORKS, arrays, clients, mlp, same_bits, seeded
from fitted import X, fit

import fedhb
from fedhb.clients.clients import Clients, Share
from fedhb.errors import DivergedError, InputError


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fedhb.evaluation.evaluate"), "EXAMPLES_AT_ONCE", 2)


def test_many_inputs_are_predicted_block_by_block(monkeypatch):
    run = fit(None, None, fedhb.EmpiricalBayes(num_samples=3))
    whole = run.predict(X)
    small_blocks(monkeypatch)
    np.testing.assert_allclose(run.predict(X), whole, rtol=1e-6)


def test_batch_statistics_are_those_of_all_inputs_given(monkeypatch):
    run = fit(NETWORKS["batch norm"](torch.float32), None, fedhb.FedAvg(), batch_norm="batch")
    whole = run.predict(X)
    small_blocks(monkeypatch)
    np.testing.assert_array_equal(run.predict(X), whole)


def test_holdout_clients_are_evaluated_and_never_trained_on():
    known, novel = clients().hold_out(2, seed=0)
    run = fit(None, known, fedhb.EmpiricalBayes(begin="last"), holdout=novel, fraction=1.0)
    assert set(run.result["holdout"]) >= {"global", "personalised"}
    assert len(run.result["holdout"]["per_client"]["global_accuracy"]) == 2
    assert len(run.result["per_client"]["global_accuracy"]) == 4
    assert set(run.state.store.memories) == set(known.ids.tolist())
    spoiled = replace(
        novel,
        train=replace(novel.train, x=novel.train.x + 5),
        test=replace(novel.test, x=novel.test.x + 5),
    )
    other = fit(None, known, fedhb.EmpiricalBayes(begin="last"), holdout=spoiled, fraction=1.0)
    assert torch.equal(other.state.server["m0"], run.state.server["m0"])
    assert (
        other.result["global"] == run.result["global"]
        and other.result["holdout"] != run.result["holdout"]
    )
    assert fit(None, known).result["holdout"] is None


@pytest.mark.parametrize(
    "name",
    [
        "empirical-bayes-full",
        "niw-full",
        "empirical-bayes-last",
        "mixture-three",
        "fedem-full",
        "fedpop-full",
        "fedbabu-body",
    ],
)
def test_clients_without_test_examples_train_and_are_left_out_of_the_means(name, tmp_path):
    every = fit(None, clients(), CASES[name], fraction=1.0)
    tests: list[Any] = arrays([3] * 6, seed=1)
    tests[1] = tests[4] = ([], [])
    who = replace(
        Clients.from_arrays(arrays(), tests, num_classes=CLASSES),
        server_inputs=clients().server_inputs,
    )
    run = fit(None, who, CASES[name], fraction=1.0, out=tmp_path / "run")
    for key, value in run.state.server.items():
        assert torch.equal(value, every.state.server[key])
    for task in ("global", "personalised"):
        kept = run.result["per_client"][f"{task}_accuracy"]
        assert kept[1] is None and kept[4] is None
        wanted = every.result["per_client"][f"{task}_accuracy"]
        assert [v for v in kept if v is not None] == [wanted[k] for k in (0, 2, 3, 5)]
        assert run.result[task]["accuracy"] == pytest.approx(
            np.mean([wanted[k] for k in (0, 2, 3, 5)])
        )
    assert fedhb.load(tmp_path / "run", model=mlp(torch.float32)).result == run.result


def test_where_no_client_has_test_examples_it_is_known_before_training(tmp_path):
    tests: list[Any] = arrays([3] * 6, seed=1)
    tests[1] = tests[4] = ([], [])
    who = Clients.from_arrays(arrays(), tests, num_classes=CLASSES)
    untested, tested = who.select([1, 4]), who.select([0, 2, 3, 5])
    with pytest.raises(InputError, match=r"holdout clients.*test"):
        fit(None, tested, holdout=untested, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fit(None, untested).result["per_client"] is None


def test_novel_clients_do_not_take_over_what_others_remember():
    """Memories belong to ids: a novel client 0 would begin with the model of the client 0 that
    trained.
    """
    who = clients()
    with pytest.raises(InputError, match=r"client 0 .*ids"):
        fit(None, who, fedhb.LocalOnly(), holdout=clients())
    run = fit(None, who, fedhb.LocalOnly(), holdout=replace(who, ids=who.ids + 6), fraction=1.0)
    assert run.result["holdout"]["personalised"] != run.result["personalised"]


def test_a_module_that_normalises_by_the_batch_is_evaluated_client_by_client():
    """Its own layers without running statistics are as batch_norm="batch": who else is evaluated
    must not matter.
    """

    def net(track):
        with seeded():
            norm = torch.nn.BatchNorm1d(5, track_running_stats=track)
            return torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 5), norm, torch.nn.Tanh(), torch.nn.Linear(5, CLASSES)
            ).float()

    examples = [
        (x + 3 * k, y) for k, (x, y) in enumerate(arrays([12] * 4))
    ]  # clients whose inputs lie apart
    who = Clients.from_arrays(examples, examples)
    own, ours = fit(net(False), who), fit(net(True), who, batch_norm="batch")
    assert same_bits(own.state.server, ours.state.server)
    assert (
        own.result["global"] == ours.result["global"]
        and own.result["personalised"] == ours.result["personalised"]
    )
    for k in range(4):
        alone = own.evaluate(who.select([k]))
        assert alone["global"]["accuracy"] == own.result["per_client"]["global_accuracy"][k]
    many = np.concatenate(
        [x for x, _ in examples] * 100
    )  # more than are predicted at once elsewhere
    assert np.array_equal(own.predict(many), ours.predict(many))


def test_a_global_model_that_predicts_nan_is_divergence():
    run = fit(None, None, fedhb.FedAvg())
    run.state.server["theta"].fill_(3e38)  # finite, and sums of it are not
    with pytest.raises(DivergedError, match=r"NaN.*learning rate"):
        run.evaluate(clients())


def test_the_numbers_are_means_over_clients():
    run = fit()
    for task in ("global", "personalised"):
        assert run.result[task]["accuracy"] == pytest.approx(
            np.mean(run.result["per_client"][f"{task}_accuracy"])
        )
    p = run.predict(np.concatenate([x for x, _ in arrays([3] * 6, seed=1)]))
    right = p.argmax(1) == np.concatenate([y for _, y in arrays([3] * 6, seed=1)])
    np.testing.assert_allclose(
        right.reshape(6, 3).mean(1), run.result["per_client"]["global_accuracy"]
    )


def test_validation_numbers_never_touch_a_test_example(monkeypatch):
    """Test inputs that are NaN and labels out of range would show in any number they enter; nothing
    even gathers them.
    """
    who = clients([9] * 6).with_validation(0.3, seed=0)
    clean = fit(None, who, evaluate_on="validation")
    poison = Share(
        torch.full_like(who.test.x, math.nan),
        torch.full_like(who.test.y, 10**6),
        who.test.rows,
        who.test.offsets,
    )
    gather = Share.examples

    def watched(self: Share, k: int, most: int | None = None) -> Any:
        assert not torch.isnan(self.x).any(), "a test example was read"
        return gather(self, k, most)

    monkeypatch.setattr(Share, "examples", watched)
    run = fit(
        None,
        replace(who, test=poison),
        evaluate_on="validation",
        holdout=replace(who, ids=who.ids + 6, test=poison),
    )
    assert run.result["split"] == "validation"
    for key in ("global", "personalised", "per_client"):
        assert run.result[key] == clean.result[key]
    with pytest.raises(AssertionError, match="a test example was read"):
        fit(None, replace(who, test=poison), evaluate_on="test")


def test_validation_examples_are_not_trained_on():
    who = clients([9] * 6).with_validation(0.3, seed=0)
    first = fit(None, who, evaluate_on="validation")
    held = who.validation.rows
    spoiled = who.train.x.clone()
    spoiled[held] += 100.0
    other = replace(
        who, train=replace(who.train, x=spoiled), validation=replace(who.validation, x=spoiled)
    )
    second = fit(None, other, evaluate_on="validation")
    assert torch.equal(first.state.server["m0"], second.state.server["m0"])
    assert first.result["global"] != second.result["global"]


def test_no_evaluation(tmp_path):
    result = fit(evaluate_on=None, out=tmp_path / "run").result
    assert (
        result["global"] is None and result["personalised"] is None and result["per_client"] is None
    )
    without = Clients.from_arrays(arrays(), num_classes=CLASSES)
    assert fit(None, without).result["global"] is None
