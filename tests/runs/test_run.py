"""A trained run: it predicts and personalises itself."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import CLASSES, FEATURES, arrays
from fitted import X, fit, images
from torch import nn

import fedhb
from fedhb.algorithms import build
from fedhb.runs.load import save_personal


def test_inputs_may_be_arrays_or_tensors_of_any_number_type():
    run = fit()
    whole = np.round(10 * X)
    expected = run.predict(whole.astype(np.float32))
    for x in (whole, whole.astype(int), torch.tensor(whole), whole.astype(np.float16)):
        np.testing.assert_array_equal(run.predict(x), expected)


def test_personalisation_is_reproducible_and_depends_on_its_settings():
    run, (x, y) = fit(), arrays()[2]
    first = run.personalise(x, y).predict(X)
    np.testing.assert_array_equal(run.personalise(x, y).predict(X), first)
    assert not np.allclose(run.personalise(x, y, epochs=9).predict(X), first)
    assert not np.allclose(run.personalise(x, y, lr=0.5).predict(X), first)
    assert not np.array_equal(
        run.personalise(x, y, client=3).predict(X), first
    )  # other minibatches


@pytest.mark.parametrize("name", ["fedavg", "empirical-bayes"])
def test_a_client_personalises_as_the_evaluation_does_it(name, tmp_path):
    """With its inputs cropped and flipped too, also from the folder, and a model that is kept."""
    known, novel = images()
    model = fedhb.nets.mlp((1, 8, 8), CLASSES, hidden=7)
    run = fit(
        model, known, build(name), holdout=novel, out=tmp_path / "run", lr=0.05, personal_lr=0.05
    )
    (x, y), (x_test, y_test) = novel.train.examples(0), novel.test.examples(0)
    memory = run.algorithm.remember(run.problem, novel)
    expected = run.algorithm.personalise(
        run.problem, run.state.server, novel, memory, run.personal_plan, run.rng
    )
    for k, one in enumerate((run, fedhb.load(tmp_path / "run", model=model))):
        assert one.augment == "crop-flip"
        mine = one.personalise(x, y, client=int(novel.ids[0]))
        assert torch.equal(mine.posterior.theta, expected.theta) and torch.equal(
            mine.posterior.head, expected.head
        )
        found = run.problem.likelihood.metrics(torch.from_numpy(mine.predict(x_test)), y_test)
        assert found == run.result["holdout"]["personalised"]
        save_personal(tmp_path / f"mine {k}", tmp_path / "run", mine)
        kept = fedhb.load(tmp_path / f"mine {k}", model=model)
        np.testing.assert_array_equal(kept.predict(x_test), mine.predict(x_test))
    plain = replace(run, augment=None).personalise(x, y, client=int(novel.ids[0]))
    assert not torch.equal(plain.posterior.theta, expected.theta)


def test_nothing_that_clients_hold_is_printed():
    x, y = np.full((4, 2), 1234.5, np.float32), np.array([0, 1, 0, 1])
    who = fedhb.Clients.from_arrays([(x, y), (x[:2], y[:2])], names=["St Mary", "North"])
    assert repr(who) == "<arrays: 2 clients with 2 to 4 training examples, inputs 2, 2 classes>"
    run = fedhb.fit(nn.Linear(2, 2), who, head="", rounds=1, progress=False)
    mine = run.personalise(x, y)
    assert (
        repr(run) == "<empirical-bayes after 1 rounds with 2 clients, seed 0>"
        and repr(mine) == "<a personal model of inputs 2>"
    )


def test_inputs_of_every_kind_are_taken():
    run, x = fit(), torch.from_numpy(X).float()
    expected = run.predict(X)
    read_only = X.astype(np.float32)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (x.clone().requires_grad_(), x.double(), read_only, X[::-1][::-1], X.tolist()):
            np.testing.assert_array_equal(run.predict(given), expected)
        np.testing.assert_allclose(run.predict(x.bfloat16()), expected, atol=0.02)
        images = np.random.default_rng(0).integers(0, 256, (4, FEATURES), dtype=np.uint8)
        np.testing.assert_array_equal(
            run.predict(images[:, ::-1]), run.predict(images[:, ::-1].copy())
        )


def test_whole_epochs_may_be_of_any_type():
    run, (x, y) = fit(), arrays()[0]
    np.testing.assert_array_equal(
        run.personalise(x, y, epochs=2.0).predict(X), run.personalise(x, y, epochs=2).predict(X)
    )
