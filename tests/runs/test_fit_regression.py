"""`fedhb.fit` on real targets: their units, several targets, constant targets."""

from __future__ import annotations

from torch import nn
import numpy as np
import pytest
import torch
from builders import FEATURES
from builders import arrays
from builders import mlp
from builders import seeded
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import GaussianRegression
from fedhb.network.factory import LEAST_DEVIATION
from fitted import X
from fitted import fit
import fedhb


@pytest.mark.parametrize(
    "algorithm",
    [
        fedhb.Mixture(update="full"),
        # in 62 dimensions the default prior is as wide as the weights: its samples would spread
        # more than the noise
        fedhb.NIW(update="full", prior_scale=0.1, num_samples=20, p_do=1.0),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_regression_from_end_to_end(algorithm, tmp_path):
    """A bent line with noise whose size depends on x: the intervals hold nine targets in ten, and
    the noise is found.
    """

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
        match="column 0 of the targets .*e-20.*unit",
    ):
        fit(mlp(torch.float32, outputs=outputs), Clients.from_arrays(tiny))
