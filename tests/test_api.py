"""The front door: fit, predict, personalise, load; and what a run's folder says."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    CASES,
    CLASSES,
    FEATURES,
    NETWORKS,
    Wrapped,
    arrays,
    batch_norm_net,
    clients,
    mlp,
    same_bits,
    seeded,
)
from torch import nn

import fedhb
from fedhb.algorithms import Plan, build
from fedhb.clients.clients import Clients, Share
from fedhb.errors import DivergedError, InputError
from fedhb.files import sealed
from fedhb.likelihood import CALM, GaussianRegression
from fedhb.network.factory import LEAST_DEVIATION
from fedhb.runs.load import save_personal

X = np.random.default_rng(7).normal(size=(9, FEATURES))


def fit(model: Any = None, who: Any = None, algorithm: Any = None, **options: Any) -> Any:
    chosen: dict[str, Any] = {
        "rounds": 3,
        "fraction": 0.5,
        "batch_size": 4,
        "personal_epochs": 2,
        "progress": False,
    } | options
    model = mlp(torch.float32) if model is None else model
    return fedhb.fit(model, clients() if who is None else who, algorithm, **chosen)


# ---- fit, predict, personalise, load


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_run_is_the_run(name, tmp_path):
    run = fit(None, None, CASES[name], out=tmp_path / "run")
    again = fedhb.load(
        tmp_path / "run", model=mlp(torch.float32, seed=5)
    )  # its own weights do not matter
    assert (
        again.algorithm == run.algorithm
        and again.result == run.result
        and again.records == run.records
    )
    assert again.seed == run.seed and again.personal_plan == run.personal_plan
    np.testing.assert_array_equal(again.predict(X), run.predict(X))
    x, y = arrays()[2]
    mine, mine_again = run.personalise(x, y), again.personalise(x, y)
    np.testing.assert_array_equal(mine_again.predict(X), mine.predict(X))
    assert not np.allclose(mine.predict(X), run.predict(X))
    for p in (run.predict(X), mine.predict(X)):
        assert p.shape == (9, CLASSES) and (p >= 0).all()
        np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("network", ["mlp", "dropout", "batch norm"])
@pytest.mark.parametrize("batch_norm", ["running", "batch"])
def test_any_network_survives_the_folder(network, batch_norm, tmp_path):
    make = NETWORKS[network]
    model = Wrapped(make(torch.float32))
    run = fit(
        model,
        clients(standardise=True),
        fedhb.NIW(update="full"),
        out=tmp_path / "run",
        batch_norm=batch_norm,
    )
    again = fedhb.load(tmp_path / "run", model=Wrapped(make(torch.float32)))
    np.testing.assert_array_equal(again.predict(X), run.predict(X))
    x, y = arrays()[0]
    np.testing.assert_array_equal(
        again.personalise(x, y).predict(X), run.personalise(x, y).predict(X)
    )


def test_a_frozen_layer_survives_the_folder(tmp_path):
    def model(seed: int) -> nn.Module:
        layers = mlp(torch.float32, seed)
        layers.hidden.weight.requires_grad_(False)
        return layers

    run = fit(model(0), out=tmp_path / "run")
    np.testing.assert_array_equal(
        fedhb.load(tmp_path / "run", model=model(1)).predict(X), run.predict(X)
    )


SCRIPT = """
import sys
import numpy as np
import fedhb
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
    def forward(self, x):
        return self.last(self.first(x).cos())

if len(sys.argv) > 1:
    folder = sys.argv[1]
    built_in, own = fedhb.load(folder + "/built-in"), fedhb.load(folder + "/own", model=Mine())
    x, y, new = (np.load(f"{folder}/{name}.npy") for name in ("x", "y", "new"))
    np.save(folder + "/found.npy", [r for run in (built_in, own) for r in (run.predict(new), run.personalise(x, y).predict(new))])
"""


def test_a_run_is_loaded_in_another_process(tmp_path):
    """A built-in network by its folder alone, a module of one's own with the module: the numbers are equal to the last bit."""
    scope: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT.replace("len(sys.argv) > 1", "False"), scope)
    built_in = fedhb.nets.mlp((FEATURES,), CLASSES, hidden=7)
    spec = {"name": "mlp", "num_outputs": CLASSES, "options": {"hidden": 7}}
    runs = [
        fit(built_in, None, fedhb.Mixture(), out=tmp_path / "built-in", rebuild=spec),
        fit(scope["Mine"](), None, fedhb.NIW(begin="last"), out=tmp_path / "own"),
    ]
    x, y = arrays()[2]
    for name, value in (("x", x), ("y", y), ("new", X)):
        np.save(tmp_path / f"{name}.npy", value)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(fedhb.__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-W", "error", "script.py", str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    found = np.load(tmp_path / "found.npy")
    expected = [p for run in runs for p in (run.predict(X), run.personalise(x, y).predict(X))]
    np.testing.assert_array_equal(found, expected)


def test_a_personal_model_has_a_folder_of_its_own(tmp_path):
    from fedhb.runs.load import save_personal

    run = fit(None, None, fedhb.NIW(), out=tmp_path / "run")
    mine = run.personalise(*arrays()[2])
    save_personal(tmp_path / "mine", tmp_path / "run", mine)
    loaded = fedhb.load(tmp_path / "mine", model=mlp(torch.float32, seed=3))
    np.testing.assert_array_equal(loaded.predict(X), mine.predict(X))


def test_the_same_seed_gives_the_same_run_whatever_was_drawn_before():
    torch.manual_seed(0)
    first = fit(seed=4)
    torch.rand(5)
    state = torch.get_rng_state()
    second = fit(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first.predict(X), second.predict(X))
    assert not np.allclose(first.predict(X), fit(seed=5).predict(X))
    assert json.dumps(first.result["global"]) == json.dumps(second.result["global"])


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit(rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_given_model_is_not_trained():
    model = mlp(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = fit(model, None, fedhb.FedAvg(), rounds=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(run.state.server["theta"], run.problem.network.theta)


def test_inputs_may_be_arrays_or_tensors_of_any_number_type():
    run = fit()
    whole = np.round(10 * X)
    expected = run.predict(whole.astype(np.float32))
    for x in (whole, whole.astype(int), torch.tensor(whole), whole.astype(np.float16)):
        np.testing.assert_array_equal(run.predict(x), expected)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fedhb.evaluation.evaluate"), "BLOCK", 2)


def test_many_inputs_are_predicted_block_by_block(monkeypatch):
    run = fit(None, None, fedhb.NIW(num_samples=3))
    whole = run.predict(X)
    small_blocks(monkeypatch)
    np.testing.assert_allclose(run.predict(X), whole, rtol=1e-6)


def test_batch_statistics_are_those_of_all_inputs_given(monkeypatch):
    run = fit(NETWORKS["batch norm"](torch.float32), None, fedhb.FedAvg(), batch_norm="batch")
    whole = run.predict(X)
    small_blocks(monkeypatch)
    np.testing.assert_array_equal(run.predict(X), whole)


def test_personalisation_is_reproducible_and_depends_on_its_settings():
    run, (x, y) = fit(), arrays()[2]
    first = run.personalise(x, y).predict(X)
    np.testing.assert_array_equal(run.personalise(x, y).predict(X), first)
    assert not np.allclose(run.personalise(x, y, epochs=9).predict(X), first)
    assert not np.allclose(run.personalise(x, y, lr=0.5).predict(X), first)
    assert not np.array_equal(
        run.personalise(x, y, client=3).predict(X), first
    )  # other minibatches


@pytest.mark.parametrize("name", ["niw", "mixture", "fedavg", "fedprox", "fedbabu"])
def test_every_algorithm_learns_and_personalises(name):
    """Three classes with means far apart, of which some clients name two the other way round: chance is a third."""
    rng = np.random.default_rng(0)
    means = 3.0 * rng.normal(size=(CLASSES, FEATURES))

    def pair(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, CLASSES, n)
        swapped = np.array([1, 0, 2]) if k == 0 else np.arange(3)
        return means[y] + rng.normal(size=(n, FEATURES)), swapped[y]

    train, test = ([pair(k, 30) for k in range(6)] for _ in range(2))
    who = Clients.from_arrays(train, test)
    algorithm = fedhb.algorithms.build(
        name, {"kl_weight": 0.01} if name in ("niw", "mixture") else {}
    )
    options = {
        "rounds": 20,
        "fraction": 1.0,
        "batch_size": 10,
        "personal_lr": 0.1,
        "personal_epochs": 20,
    }
    with seeded():
        model = fedhb.nets.mlp((FEATURES,), CLASSES, hidden=32)
    result = fit(model, who, algorithm, **options).result
    assert result["global"]["accuracy"] > 0.75 and result["personalised"]["accuracy"] > 0.85
    odd = result["per_client"]
    assert odd["global_accuracy"][0] < 0.6 < 0.75 < odd["personalised_accuracy"][0]


# ---- regression


@pytest.mark.parametrize(
    "algorithm",
    [
        fedhb.Mixture(update="full"),
        # in 62 dimensions the default prior is as wide as the weights: its samples would spread more than the noise
        fedhb.NIW(update="full", prior_scale=0.1, num_samples=20, p_do=1.0),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_regression_from_end_to_end(algorithm, tmp_path):
    """A bent line with noise whose size depends on x: the intervals hold nine targets in ten, and the noise is found."""

    def pair(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([k, n])
        x = rng.uniform(-2, 2, size=(n, 1))
        return x, 50 + 10 * np.abs(x[:, 0]) + (1 + (x[:, 0] > 0)) * rng.normal(size=n)

    who = Clients.from_arrays(
        [pair(k, 150) for k in range(8)], [pair(k, 100) for k in range(8)], standardise=True
    )
    with seeded():
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))
    options = {"rounds": 40, "fraction": 0.5, "batch_size": 25, "lr": 0.1, "local_epochs": 2}
    run = fit(model, who, algorithm, out=tmp_path / "run", **options)
    for task in ("global", "personalised"):
        metrics = run.result[task]
        assert list(metrics) == ["rmse", "nll", "coverage"]
        assert metrics["rmse"] < 2.0  # the noise alone is 1.6, the targets' own deviation 6
        assert abs(metrics["coverage"] - 0.9) < 0.05
        assert metrics["nll"] < 2.1  # 1.8 for the true model
    assert list(run.result["per_client"])[-2:] == ["global_rmse", "personalised_rmse"]
    prediction = run.predict(np.array([[-1.0], [1.0]]))
    assert prediction.shape == (2, 2, 1)
    np.testing.assert_allclose(prediction[:, 0, 0], [60, 60], atol=1.5)
    assert np.sqrt(prediction[1, 1, 0]) > 1.3 * np.sqrt(prediction[0, 1, 0])
    again = fedhb.load(tmp_path / "run", model=model)
    assert isinstance(again.problem.likelihood, GaussianRegression)
    np.testing.assert_array_equal(again.predict(np.zeros((3, 1))), run.predict(np.zeros((3, 1))))
    mine = run.personalise(*pair(99, 40))
    assert mine.predict(np.zeros((3, 1))).shape == (3, 2, 1)


def test_regression_does_not_depend_on_the_units_of_the_targets():
    who = [(x, x[:, 0] + 0.1 * x[:, 1]) for x, _ in arrays([30] * 4)]
    # powers of two: float32 targets are scaled without rounding
    other = [(x, 1024.0 * y) for x, y in who]
    one, two = (
        fit(mlp(torch.float32, outputs=2), Clients.from_arrays(pairs), fedhb.NIW())
        for pairs in (who, other)
    )
    np.testing.assert_allclose(
        two.predict(X)[:, 0], 1024 * one.predict(X)[:, 0], rtol=1e-4, atol=1e-2
    )
    np.testing.assert_allclose(two.predict(X)[:, 1], 1024**2 * one.predict(X)[:, 1], rtol=1e-3)


def test_several_targets_and_fixed_noise():
    who = Clients.from_arrays([(x, x[:, :2]) for x, _ in arrays([30] * 4)])
    run = fit(mlp(torch.float32, outputs=2), who)
    assert (
        run.problem.likelihood.num_targets == 2
        and run.problem.likelihood.noise == run.problem.likelihood.scale
    )
    assert run.predict(X).shape == (9, 2, 2)
    assert run.personalise(X, X[:, :2]).predict(X).shape == (9, 2, 2)


@pytest.mark.parametrize("outputs", [2, 4])
def test_no_target_depends_on_the_units_of_another(outputs):
    who = [(x, np.stack([x[:, 0] + 3, x[:, 1] - x[:, 0]], axis=1)) for x, _ in arrays([30] * 4)]
    units = np.array([1024.0, 2.0**-14])
    runs = [
        fit(mlp(torch.float32, outputs=outputs), Clients.from_arrays([(x, u * y) for x, y in who]))
        for u in (1.0, units)
    ]
    one, two = (run.predict(X) for run in runs)
    np.testing.assert_allclose(two[:, 0] / units, one[:, 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(two[:, 1] / units**2, one[:, 1], rtol=1e-3)


def test_a_small_target_is_learned_beside_a_large_one():
    def pair(k: int, n: int = 100) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(k)
        x = rng.normal(size=(n, FEATURES))
        return x, (x[:, :2] + 0.05 * rng.normal(size=(n, 2))) * [1000.0, 1.0]

    run = fit(
        mlp(torch.float32, outputs=2),
        Clients.from_arrays([pair(k) for k in range(4)]),
        rounds=20,
        fraction=1.0,
    )
    x, y = pair(9)
    error = np.sqrt(np.square(run.predict(x)[:, 0] - y).mean(0))
    assert (error < [400.0, 0.4]).all()  # they deviate by 1000 and by 1


@pytest.mark.parametrize("outputs", [2, 4])
def test_a_constant_target_among_others_is_like_one_alone(outputs):
    who = [(x, np.stack([x[:, 0], np.full(len(x), 0.1)], axis=1)) for x, _ in arrays([30] * 4)]
    run = fit(mlp(torch.float32, outputs=outputs), Clients.from_arrays(who))
    alone = fit(
        mlp(torch.float32, outputs=outputs // 2),
        Clients.from_arrays([(x, y[:, 1]) for x, y in who]),
    )
    assert run.problem.likelihood.scale[1] == alone.problem.likelihood.scale == LEAST_DEVIATION
    assert run.problem.likelihood.centre[1] == alone.problem.likelihood.centre == np.float32(0.1)
    for found in (run.predict(X)[:, :, 1], alone.predict(X)[:, :, 0]):
        np.testing.assert_allclose(found[:, 0], np.float32(0.1), rtol=1e-6)
        assert (found[:, 1] < 1e-20).all()
    tiny = [(x, np.float32(1e-20) * y) for x, y in who]
    with pytest.raises(
        InputError,
        match=r"column 0 of the targets deviates by .*e-20 from its mean: give it in a smaller unit",
    ):
        fit(mlp(torch.float32, outputs=outputs), Clients.from_arrays(tiny))


def test_a_single_example_has_no_deviation():
    who = Clients.from_arrays([(X[:1], X[:1, :2])])
    assert fit(mlp(torch.float32, outputs=4), who, fraction=1.0).problem.likelihood.scale == (
        LEAST_DEVIATION,
        LEAST_DEVIATION,
    )


def test_one_target_has_plain_numbers():
    """Those of all its examples at once, whether or not it has an axis of its own: records and fingerprints hold them."""
    pairs = arrays([30] * 4)
    y = torch.from_numpy(np.concatenate([x[:, 0] for x, _ in pairs]).astype(np.float32)).double()
    expected = GaussianRegression(1, centre=y.mean().item(), scale=y.std().item(), **CALM)
    for column in (0, slice(0, 1)):
        run = fit(
            mlp(torch.float32, outputs=2),
            Clients.from_arrays([(x, x[:, column]) for x, _ in pairs]),
        )
        assert run.problem.likelihood == expected and isinstance(
            run.problem.likelihood.scale, float
        )


@pytest.mark.parametrize("outputs", [2, 4])
def test_several_targets_survive_the_folder(outputs, tmp_path):
    model = mlp(torch.float32, outputs=outputs)
    run = fit(
        model,
        Clients.from_arrays([(x, x[:, :2] * [1.0, 50.0]) for x, _ in arrays([30] * 4)]),
        out=tmp_path / "run",
    )
    again = fedhb.load(tmp_path / "run", model=model)
    assert again.problem.likelihood == run.problem.likelihood and isinstance(
        again.problem.likelihood.scale, tuple
    )
    np.testing.assert_array_equal(again.predict(X), run.predict(X))


def rewritten(folder: Path, change: Any) -> None:
    """problem.json with some of it changed, and sealed again."""
    record = json.loads((folder / "problem.json").read_text())
    record.pop("checksum")
    change(record)
    (folder / "problem.json").write_bytes(sealed(record))


def test_a_folder_with_one_scale_for_several_targets_is_loaded_and_nonsense_is_not(tmp_path):
    model = mlp(torch.float32, outputs=2)
    fit(
        model,
        Clients.from_arrays([(x, x[:, :2]) for x, _ in arrays([30] * 4)]),
        out=tmp_path / "run",
    )
    before = {"num_targets": 2, "centre": 0.5, "scale": 2.0, "noise": 2.0}  # as runs had it once
    rewritten(tmp_path / "run", lambda record: record["likelihood"].update(settings=before))
    old = fedhb.load(tmp_path / "run", model=model)
    assert old.problem.likelihood == GaussianRegression(**before)
    assert old.predict(X).shape == (9, 2, 2)
    for wrong in (
        {"scale": [1.0]},
        {"scale": [1.0, 0.0]},
        {"noise": ["a", "b"]},
        {"centre": {}},
        {"centre": [[1.0], [2.0]]},
    ):
        rewritten(
            tmp_path / "run",
            lambda record, wrong=wrong: record["likelihood"].update(settings=before | wrong),
        )
        with pytest.raises(
            InputError,
            match=rf"problem.json: no such likelihood \({next(iter(wrong))}=.*\): restore it",
        ):
            fedhb.load(tmp_path / "run", model=model)


# ---- augmentation


def images() -> tuple[Clients, Clients]:
    """Four clients with small images that are cropped and flipped in training, and a novel one."""
    rng = np.random.default_rng(0)
    train, test = (
        [(rng.normal(size=(n, 1, 8, 8)), rng.integers(0, CLASSES, n)) for _ in range(5)]
        for n in (12, 9)
    )
    who = Clients.from_arrays(train, test, num_classes=CLASSES)
    return replace(who, augment="crop-flip").hold_out(1, seed=0)


@pytest.mark.parametrize("name", ["fedavg", "niw"])
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


def test_a_folder_says_how_inputs_are_varied(tmp_path):
    """Runs that did not keep it vary nothing; anything but what there is makes no sense."""
    known, _ = images()
    model = fedhb.nets.mlp((1, 8, 8), CLASSES, hidden=7)
    fit(model, known, out=tmp_path / "run", rounds=1)
    for wrong in ("mirror", "", True, 1, ["crop-flip"]):
        rewritten(tmp_path / "run", lambda record, wrong=wrong: record.update(augment=wrong))
        with pytest.raises(InputError, match=r"problem.json makes no sense \(its 'augment'\)"):
            fedhb.load(tmp_path / "run", model=model)
    rewritten(tmp_path / "run", lambda record: record.pop("augment"))
    assert fedhb.load(tmp_path / "run", model=model).augment is None
    rewritten(
        tmp_path / "run", lambda record: record.update(augment="crop-flip", input_shape=[64])
    )  # no images
    with pytest.raises(InputError, match="its 'augment'"):
        fedhb.load(tmp_path / "run", model=model)
    with pytest.raises(InputError, match="could not be loaded again"):
        fit(model, replace(known, augment="mirror"), out=tmp_path / "other", rounds=1)


# ---- what is evaluated


def test_holdout_clients_are_evaluated_and_never_trained_on():
    known, novel = clients().hold_out(2, seed=0)
    run = fit(None, known, fedhb.NIW(begin="last"), holdout=novel, fraction=1.0)
    assert set(run.result["holdout"]) >= {"global", "personalised"}
    assert len(run.result["holdout"]["per_client"]["global_accuracy"]) == 2
    assert len(run.result["per_client"]["global_accuracy"]) == 4
    assert set(run.state.store.memories) == set(known.ids.tolist())
    spoiled = replace(
        novel,
        train=replace(novel.train, x=novel.train.x + 5),
        test=replace(novel.test, x=novel.test.x + 5),
    )
    other = fit(None, known, fedhb.NIW(begin="last"), holdout=spoiled, fraction=1.0)
    assert torch.equal(other.state.server["m0"], run.state.server["m0"])
    assert (
        other.result["global"] == run.result["global"]
        and other.result["holdout"] != run.result["holdout"]
    )
    assert fit(None, known).result["holdout"] is None


@pytest.mark.parametrize(
    "name", ["niw-full", "niw-last", "mixture-three", "fedem-full", "fedpop-full", "fedbabu-body"]
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
    with pytest.raises(InputError, match="the holdout clients have no test examples"):
        fit(None, tested, holdout=untested, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fit(None, untested).result["per_client"] is None


def test_novel_clients_do_not_take_over_what_others_remember():
    """Memories belong to ids: a novel client 0 would begin with the model of the client 0 that trained."""
    who = clients()
    with pytest.raises(
        InputError, match="client 0 trains and is held out: give the holdout clients ids"
    ):
        fit(None, who, fedhb.LocalOnly(), holdout=clients())
    run = fit(None, who, fedhb.LocalOnly(), holdout=replace(who, ids=who.ids + 6), fraction=1.0)
    assert run.result["holdout"]["personalised"] != run.result["personalised"]


def test_ids_that_are_no_names_of_files_are_refused():
    for wrong in (-1, 10**18):
        with pytest.raises(InputError, match=f"id {wrong}: give whole numbers from 0"):
            Clients.from_arrays(arrays([5] * 3), ids=[0, wrong, 3])
    run = fit(
        None,
        Clients.from_arrays(arrays([5] * 3), ids=[0, 10**18 - 1, 3]),
        fedhb.LocalOnly(),
        fraction=1.0,
    )
    assert sorted(run.state.store.memories) == [0, 3, 10**18 - 1]


def test_a_module_that_normalises_by_the_batch_is_evaluated_client_by_client():
    """Its own layers without running statistics are as batch_norm="batch": who else is evaluated must not matter."""

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


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
def test_single_examples_under_batch_norm_are_refused_before_the_first_round(batch_norm, tmp_path):
    some, tests = arrays([9, 9, 9]), arrays([4, 1, 4], seed=1)
    one = Clients.from_arrays(
        [some[0], (some[1][0][:1], some[1][1][:1]), some[2]], arrays([4] * 3, seed=1)
    )
    with pytest.raises(
        InputError, match="client 1 has a single example, and batch norm cannot train on one"
    ):
        fit(
            batch_norm_net(torch.float32),
            one,
            batch_norm=batch_norm,
            fraction=0.1,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
    few = Clients.from_arrays(some, tests)
    if batch_norm == "running":
        assert (
            fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm).result["global"][
                "accuracy"
            ]
            >= 0
        )
        return
    with pytest.raises(
        InputError,
        match="client 1 has a single test example, and this network normalises by the batch",
    ):
        fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm)
    assert (
        fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm, evaluate_on=None).result[
            "global"
        ]
        is None
    )


def test_a_global_model_that_predicts_nan_is_divergence():
    run = fit(None, None, fedhb.FedAvg())
    run.state.server["theta"].fill_(3e38)  # finite, and sums of it are not
    with pytest.raises(DivergedError, match="the global model predicts NaN or infinity"):
        run.evaluate(clients())


@pytest.mark.parametrize("algorithm", [fedhb.NIW(lambda0=1.0), fedhb.Mixture(shrink=True)])
def test_a_prior_that_shortens_weights_warns_of_running_statistics(algorithm):
    with pytest.warns(UserWarning, match="running statistics stay those of longer ones"):
        fit(batch_norm_net(torch.float32), clients([9] * 4), algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(batch_norm_net(torch.float32), clients([9] * 4), algorithm, batch_norm="batch")
        fit(batch_norm_net(torch.float32), clients([9] * 4), type(algorithm)())


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
    """Test inputs that are NaN and labels out of range would show in any number they enter; nothing even gathers them."""
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


def test_fit_takes_the_algorithms_own_training(monkeypatch):
    monkeypatch.setattr(
        fedhb.FedBABU,
        "training",
        {"lr": 0.02, "momentum": 0.5, "personal_lr": 0.3, "personal_epochs": 2},
    )
    values = {"lr": None, "momentum": None, "personal_lr": None, "personal_epochs": None}
    own = fit(None, None, fedhb.FedBABU(), **values)
    assert own.records[0]["lr"] == 0.02
    assert (own.personal_plan.lr, own.personal_plan.epochs, own.personal_plan.momentum) == (
        0.3,
        2,
        0.5,
    )
    given = fit(None, None, fedhb.FedBABU(), **fedhb.FedBABU.training)
    assert torch.equal(own.state.server["theta"], given.state.server["theta"])
    assert fit(None, None, fedhb.FedBABU(), **values | {"lr": 0.04}).records[0]["lr"] == 0.04


def test_no_evaluation(tmp_path):
    result = fit(evaluate_on=None, out=tmp_path / "run").result
    assert (
        result["global"] is None and result["personalised"] is None and result["per_client"] is None
    )
    without = Clients.from_arrays(arrays(), num_classes=CLASSES)
    assert fit(None, without).result["global"] is None


# ---- the folder


def test_the_result_has_the_keys_that_were_promised(tmp_path):
    known, novel = clients().hold_out(2, seed=0)
    run = fit(None, known, holdout=novel, out=tmp_path / "run", seed=5)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result == run.result
    promised = {
        "algorithm",
        "dataset",
        "seed",
        "rounds",
        "global",
        "personalised",
        "holdout",
        "per_client",
        "communication",
    }
    assert set(result) == promised | {"data", "executor", "seconds", "split"}
    assert (result["algorithm"], result["dataset"], result["seed"], result["rounds"]) == (
        "niw",
        "arrays",
        5,
        3,
    )
    for metrics in (
        result["global"],
        result["personalised"],
        result["holdout"]["global"],
        result["holdout"]["personalised"],
    ):
        assert list(metrics) == ["accuracy", "nll", "brier", "ece"]
        assert all(0 <= metrics[key] <= 1 for key in ("accuracy", "ece")) and metrics["nll"] > 0
    assert result["per_client"].keys() == {"client", "global_accuracy", "personalised_accuracy"}
    assert result["per_client"]["client"] == known.ids.tolist()
    assert set(result["communication"]) == {"down_bytes", "up_bytes", "per_client_round"}
    assert all(value >= 0 for value in result["seconds"].values())


def test_a_folder_holds_what_was_promised(tmp_path):
    out = tmp_path / "run"
    run = fit(None, None, fedhb.Mixture(), out=out)
    assert {p.name for p in out.iterdir()} - {".lock"} == {
        "settings.toml",
        "problem.json",
        "rounds.jsonl",
        "result.json",
        "evaluation.json",
        "checkpoint",
    }
    settings = tomllib.loads((out / "settings.toml").read_text())
    assert settings["rounds"] == 3 and settings["mixture"]["num_prototypes"] == 2
    assert torch.__version__ in (out / "settings.toml").read_text()
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert lines == run.records and [line["round"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {
            "round",
            "lr",
            "clients",
            "loss",
            "score",
            "down_bytes",
            "up_bytes",
            "seconds",
        } <= line.keys()
    assert {p.suffix for p in (out / "checkpoint").rglob("*") if p.is_file()} == {
        ".json",
        ".safetensors",
    }


def test_a_finished_run_that_is_asked_for_other_numbers_is_evaluated_again(tmp_path):
    """Training is not repeated, the result is that of a fresh run with those settings, and what was asked before is kept."""
    known, novel = clients().hold_out(2, seed=0)
    out = tmp_path / "run"
    first = fit(None, known, out=out, evaluate_on=None)
    assert first.result["global"] is None
    changes: list[dict[str, Any]] = [
        {},
        {"personal_lr": 0.3},
        {"personal_epochs": 4},
        {"holdout": novel},
    ]
    for change in changes:
        found = fit(None, known, out=out, resume=True, **change).result
        fresh = fit(None, known, **change).result
        for key in ("global", "personalised", "holdout", "per_client", "split"):
            assert found[key] == fresh[key], (change, key)
        written = (out / "result.json").read_bytes()
        assert (
            fit(None, known, out=out, resume=True, **change).result == found == json.loads(written)
        )
        assert (out / "result.json").read_bytes() == written, "nothing was done"
    other = replace(known, test=replace(known.test, x=known.test.x + 1.0))
    assert fit(None, other, out=out, resume=True, holdout=novel).result["global"] != found["global"]
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 3
    assert (out / "evaluation.json").exists()
    assert fit(None, known, out=out, resume=True, evaluate_on=None).result["global"] is None
    assert not (out / "evaluation.json").exists(), "it would be that of another evaluation"


@dataclass(frozen=True)
class Mine(fedhb.FedAvg):
    """With settings of kinds that ours do not have."""

    name = "mine"
    cap: float | None = None
    layers: tuple[int, ...] = (1, 2)
    note: str = 'a "word"'


def test_an_algorithm_of_ones_own_with_any_settings_is_loaded_and_described(tmp_path):
    run = fit(None, None, Mine(), out=tmp_path / "run")
    loaded = fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine())
    np.testing.assert_array_equal(loaded.predict(X), run.predict(X))
    own = tomllib.loads((tmp_path / "run/settings.toml").read_text())["mine"]
    assert own["layers"] == [1, 2] and own["note"] == 'a "word"' and "cap" not in own
    with pytest.raises(
        InputError, match=r"was trained with mine.note='a \"word\"', not with 'another'"
    ):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine(note="another"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"algorithm": fedhb.NIW}, "algorithm=the class NIW: give an instance"),
        ({"algorithm": "niw"}, "algorithm='niw': give an instance"),
        ({"model": nn.Linear}, "give a torch module itself"),
        ({"rounds": 2.5}, "rounds=2.5: give a whole number"),
        ({"rounds": True}, "rounds=True: give a whole number"),
        ({"lr": "a"}, "lr='a': give a number"),
        ({"callbacks": fedhb.Callback}, "give a list of them"),
        ({"resume": True}, "resume=True without `out`"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(given, says):
    with pytest.raises(InputError, match=says):
        fit(**given)


def test_numpys_numbers_are_numbers():
    assert fit(rounds=np.int64(1), lr=np.float32(0.1), seed=np.int32(3)).state.done == 1


def test_nothing_that_clients_hold_is_printed():
    x, y = np.full((4, 2), 1234.5, np.float32), np.array([0, 1, 0, 1])
    who = fedhb.Clients.from_arrays([(x, y), (x[:2], y[:2])], names=["St Mary", "North"])
    assert repr(who) == "<arrays: 2 clients with 2 to 4 training examples, inputs 2, 2 classes>"
    run = fedhb.fit(nn.Linear(2, 2), who, head="", rounds=1, progress=False)
    mine = run.personalise(x, y)
    assert (
        repr(run) == "<niw after 1 rounds with 2 clients, seed 0>"
        and repr(mine) == "<a personal model of inputs 2>"
    )


def test_every_name_is_completed():
    assert set(fedhb.__all__) <= set(dir(fedhb))


def test_a_round_says_what_json_cannot_hold(tmp_path):
    class Adds(fedhb.Callback):
        def on_round(self, record: dict[str, Any], state: Any) -> None:
            record["norm"] = torch.ones(1)

    with pytest.raises(
        InputError, match="a round's record has 'norm' of type Tensor, which JSON cannot hold"
    ):
        fit(out=tmp_path / "run", callbacks=[Adds()])


def test_a_folder_of_runs_is_no_run(tmp_path):
    fit(None, None, fedhb.FedAvg(), out=tmp_path / "several/fedavg-seed0")
    with pytest.raises(
        InputError,
        match=r"several holds no run .* there are runs in it, such as .*fedavg-seed0: give one",
    ):
        fedhb.load(tmp_path / "several")
    (tmp_path / "file.npz").write_bytes(b"")
    with pytest.raises(InputError, match=r"file.npz holds no run"):
        fedhb.load(tmp_path / "file.npz")


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        (
            fedhb.Mixture(patience=10_001),
            {},
            "patience=10001: give a number of at least 0 and at most 10000",
        ),
        (fedhb.NIW(), {"seed": 2**53 + 1}, "seed=9007199254740993: give at most"),
        (fedhb.NIW(), {"batch_size": 10**30}, "give at most"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_training(
    tmp_path, algorithm, options, says
):
    with pytest.raises(InputError, match=says):
        fit(None, None, algorithm, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_kept_as_numbers(tmp_path):
    options = {
        "rounds": np.int64(2),
        "lr": np.float64(0.05),
        "momentum": np.float32(0.5),
        "seed": np.int64(3),
    }
    run = fit(None, None, fedhb.FedProx(mu=np.float64(0.1)), out=tmp_path / "run", **options)
    kept = tomllib.loads((tmp_path / "run/settings.toml").read_text())
    assert (kept["rounds"], kept["lr"], kept["momentum"], kept["seed"], kept["fedprox"]["mu"]) == (
        2,
        0.05,
        0.5,
        3,
        0.1,
    )
    plain = {"rounds": 2, "lr": 0.05, "momentum": 0.5, "seed": 3}
    again = fit(None, None, fedhb.FedProx(mu=0.1), out=tmp_path / "run", resume=True, **plain)
    assert again.result == run.result  # the same run, not another


def test_settings_of_an_algorithm_of_ones_own_have_no_bounds_of_ours(tmp_path):
    @dataclass(frozen=True)
    class Mine(fedhb.FedAvg):
        name = "mine"
        mode: str = "fast"
        alpha: float = 0.0
        rho: float = -1.0
        buffer: int = 50_000

    run = fit(None, None, Mine(), out=tmp_path / "run")
    assert (
        fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine()).result
        == run.result
    )


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (fedhb.NIW(kl_weight="much"), "niw.kl_weight='much': give a number"),  # type: ignore[arg-type]
        (fedhb.NIW(num_samples=1.5), "niw.num_samples=1.5: give a whole number"),  # type: ignore[arg-type]
        (fedhb.NIW(dof="half"), "niw.dof='half': choose full or per_coordinate or per_layer"),  # type: ignore[arg-type]
        (fedhb.NIW(begin="nearest"), "niw.begin='nearest': choose global or last"),
        (fedhb.Mixture(sigma2=0.0), "mixture.sigma2=0.0: give a positive number"),
        (
            fedhb.FedPA(burn_in=1.5),
            "fedpa.burn_in=1.5: give a number of at least 0.0 and at most 1.0",
        ),
        (fedhb.FedProx(mu=math.nan), "fedprox.mu=nan: give a number of at least 0.0"),
    ],
)
def test_settings_of_algorithms_have_bounds(algorithm, says):
    with pytest.raises(InputError, match=re.escape(says)):
        fit(None, None, algorithm)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_run_is_not_resumed_on_inputs_that_were_changed(split, tmp_path):
    """Of a named data set too, whose files are known by their hashes: examples may be changed after they are read."""
    digits = fedhb.data.load("digits")
    examples = getattr(digits, split)
    turned = replace(digits, **{split: replace(examples, x=examples.x[..., ::-1].copy())})
    before, after = (
        fedhb.partition.shards(d, num_clients=4, shards_per_client=5, seed=0)
        for d in (digits, turned)
    )
    net = fedhb.nets.mlp((1, 8, 8), 10)
    options = {"rounds": 2, "out": tmp_path / "run"}
    first = fit(net, before, fedhb.FedAvg(), **options)
    if split == "train":
        with pytest.raises(InputError, match="another configuration"):
            fit(net, after, fedhb.FedAvg(), resume=True, **options)
    else:  # the posterior is the same, its evaluation is not
        again = fit(net, after, fedhb.FedAvg(), resume=True, **options)
        assert again.result["global"] != first.result["global"]
        assert again.result["global"] == fit(net, after, fedhb.FedAvg(), rounds=2).result["global"]


def test_a_personal_model_takes_no_folder_that_holds_something(tmp_path):
    run = fit(out=tmp_path / "run")
    mine = run.personalise(*arrays()[0])
    with pytest.raises(InputError, match="run is not empty: give a new folder"):
        save_personal(tmp_path / "run", tmp_path / "run", mine)
    assert isinstance(fedhb.load(tmp_path / "run", model=mlp(torch.float32)), fedhb.Run)
    save_personal(tmp_path / "mine", tmp_path / "run", mine)
    assert isinstance(fedhb.load(tmp_path / "mine", model=mlp(torch.float32)), fedhb.Personal)


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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda run: fedhb.fit(mlp(torch.float32), [(X, X)]),
            r"clients is a list: give fedhb.Clients",
        ),
        (
            lambda run: run.evaluate(clients(), "tset"),
            r"split='tset': give one that the clients have",
        ),
        (
            lambda run: run.evaluate(clients(), "validation"),
            r"split='validation': give one that the clients have",
        ),
        (
            lambda run: run.personalise(*arrays()[0], epochs=1.5),
            r"epochs=1.5: give a positive whole number",
        ),
    ],
)
def test_what_makes_no_sense_at_the_front_door_is_told(call, says):
    with pytest.raises(InputError, match=says):
        call(fit())


def test_whole_epochs_may_be_of_any_type():
    run, (x, y) = fit(), arrays()[0]
    np.testing.assert_array_equal(
        run.personalise(x, y, epochs=2.0).predict(X), run.personalise(x, y, epochs=2).predict(X)
    )


def test_a_run_is_not_loaded_with_another_module(tmp_path):
    """As many weights are not the same network: other functions between them, or other layers."""
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    run = fit(net, out=tmp_path / "run")
    np.testing.assert_array_equal(
        fedhb.load(tmp_path / "run", model=net).predict(X), run.predict(X)
    )
    others = [
        nn.Sequential(net[0], nn.Tanh(), net[2]),
        nn.Sequential(net[0], nn.ReLU(), Twice(net[2])),
    ]
    for other in others:
        with pytest.raises(InputError, match="was trained with another module"):
            fedhb.load(tmp_path / "run", model=other)


@pytest.mark.parametrize("probe", [[], [0.0], [0.0] * 100, "zeros", [1]])
def test_a_probe_that_makes_no_sense_is_refused(probe, tmp_path):
    fit(out=tmp_path / "run")
    path = tmp_path / "run/problem.json"
    record = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"
    }
    path.write_bytes(sealed(record | {"probe": probe}))
    with pytest.raises(InputError, match=r"another module|'probe'"):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32))


class Twice(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = 2 * self.inner(x)
        return found


def test_a_subclass_without_a_name_of_its_own_is_not_taken_for_the_built_in(tmp_path):
    @dataclass(frozen=True)
    class Tempered(fedhb.FedAvg):
        def predict(self, problem: Any, server: Any, x: Any, rng: Any, memory: Any = None) -> Any:
            p = super().predict(problem, server, x, rng, memory) ** 0.1
            return p / p.sum(-1, keepdim=True)

    run = fit(None, None, Tempered(), out=tmp_path / "run")
    with pytest.raises(
        InputError, match=r"Tempered, which is your own: give it, load\(path, algorithm"
    ):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32))
    again = fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Tempered())
    np.testing.assert_array_equal(again.predict(X), run.predict(X))


def test_a_personal_model_is_kept_with_its_own_run_alone(tmp_path):
    pairs = arrays([20] * 4)
    one, two = (
        fit(
            who=Clients.from_arrays([(k * x, y) for x, y in pairs], standardise=True),
            out=tmp_path / str(k),
        )
        for k in (1, 2)
    )
    with pytest.raises(InputError, match="2 is not the run that this model comes from"):
        save_personal(tmp_path / "mine", tmp_path / "2", one.personalise(*pairs[0]))
    save_personal(tmp_path / "mine", tmp_path / "2", two.personalise(*pairs[0]))


def test_the_head_is_what_runs_last_or_is_named():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, CLASSES)
            self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.body(x))
            return found

    with pytest.raises(
        InputError, match=r"is 'body.0', but 'out' runs last: say which is the head, head='out'"
    ):
        fit(Backwards())
    assert fit(Backwards(), head="out").problem.network.head_name == "out"


def test_weights_that_the_outputs_do_not_need_stay_as_they_are():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.body, self.out = (
                nn.Linear(3, 3),
                nn.Linear(FEATURES, 16),
                nn.Linear(16, CLASSES),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(torch.tanh(self.body(x)))
            return found

    net = Spare()
    run = fit(net, None, fedhb.FedAvg(), lr=0.1)
    (slot,) = (s for s in run.problem.network.body_slots if s.name == "spare.weight")
    torch.testing.assert_close(slot.of(run.state.server["theta"]), net.spare.weight)
    assert not torch.equal(run.state.server["theta"], run.problem.network.theta)


class Recurrent(nn.Module):
    """Without batch_first: it runs along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNN(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.cell(x.unsqueeze(1))[0][:, 0])
        return found


def test_a_model_that_may_not_be_meant_so_is_warned_of():
    softmax = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES), nn.Softmax(-1)
    )
    for net, says in ((softmax, "leave out its softmax"), (Recurrent(), "batch_first=True")):
        with pytest.warns(UserWarning, match=says):
            fit(net)


def test_holdout_clients_are_like_those_that_train():
    others: list[tuple[Any, str]] = [
        (
            Clients.from_arrays([(np.zeros((4, FEATURES + 1)), np.array([0, 1, 0, 1]))] * 2),
            "inputs of shape",
        ),
        (
            Clients.from_arrays([(np.zeros((4, FEATURES)), np.array([0.5, 1, 0, 1]))] * 2),
            "other targets",
        ),
        (
            Clients.from_arrays(
                [(np.zeros((4, FEATURES)), np.arange(4))] * 2, num_classes=CLASSES + 5
            ),
            "classes",
        ),
    ]
    for who, says in others:
        who = replace(who, ids=who.ids + 100)
        with pytest.raises(InputError, match=f"holdout clients have .*{says}"):
            fit(holdout=who, evaluate_on="train")
        with pytest.raises(InputError, match="give some as in training"):
            fit().evaluate(who, "train")


def test_an_algorithm_cannot_ask_for_single_answers():
    @dataclass(frozen=True)
    class Asks(fedhb.FedAvg):
        name = "asks"
        gathers = True

    with pytest.raises(InputError, match=r"asks.gathers: only filters see single answers"):
        fit(None, None, Asks())


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit()
    assert list(Path(tmp_path).iterdir()) == []


def test_from_arrays_to_a_prediction():
    """The README's way: one (x, y) pair per client, images as they are stored."""
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8), rng.integers(0, 4, 6))
        for _ in range(3)
    ]
    who = Clients.from_arrays(pairs, pairs, num_classes=4, standardise=True, ids=[7, 3, 5])
    run = fit(fedhb.nets.convnet((1, 8, 8), 4), who, fedhb.NIW(begin="last"), fraction=1.0)
    assert run.predict(pairs[0][0]).shape == (6, 4)
    assert sorted(run.state.store.memories) == [3, 5, 7]
    assert run.personalise(*pairs[0]).predict(pairs[0][0]).shape == (6, 4)


def test_clients_train_and_personalise_as_they_were_told():
    plans: dict[str, list[Any]] = {"train": [], "personalise": []}

    class Spy(fedhb.FedBABU):
        def local_update(
            self, problem: Any, received: Any, clients: Any, memory: Any, plan: Any, rng: Any
        ) -> Any:
            plans["train"].append(plan)
            return super().local_update(problem, received, clients, memory, plan, rng)

        def personalise(
            self, problem: Any, server: Any, clients: Any, memory: Any, plan: Any, rng: Any
        ) -> Any:
            plans["personalise"].append(plan)
            return super().personalise(problem, server, clients, memory, plan, rng)

    options = {
        "lr": 0.2,
        "momentum": 0.5,
        "local_epochs": 2,
        "batch_size": 3,
        "personal_lr": 0.01,
        "personal_epochs": 4,
    }
    run = fit(None, None, Spy(), rounds=8, **options)
    rates = [0.2] * 4 + [0.02] * 2 + [0.002] * 2
    assert (
        [plan.lr for plan in plans["train"]]
        == pytest.approx(rates)
        == [record["lr"] for record in run.records]
    )
    assert {(p.epochs, p.batch_size, p.momentum, p.train_head) for p in plans["train"]} == {
        (2, 3, 0.5, False)
    }
    assert set(plans["personalise"]) == {Plan(4, 3, 0.01, 0.5, True)}
    plans["train"].clear()
    fit(None, None, Spy(update="full"), rounds=1)
    assert all(plan.train_head for plan in plans["train"])


def test_callbacks_are_told_of_every_round():
    told: list[Any] = []

    class Note:
        def on_start(self, done: int, rounds: int) -> None:
            told.append(("start", done, rounds))

        def on_round(self, record: dict[str, Any], state: Any) -> None:
            record["mine"] = 2 * record["round"]
            told.append(("round", record["round"], state.done))

        def on_end(self) -> None:
            told.append("end")

    run = fit(callbacks=[Note()])
    assert told == [("start", 0, 3), ("round", 1, 1), ("round", 2, 2), ("round", 3, 3), "end"]
    assert [record["mine"] for record in run.records] == [2, 4, 6]


def test_progress_is_shown_on_the_error_stream(capfd):
    fit(progress=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "niw seed 0: round 3/3" in captured.err
