"""Likelihoods against torch, scikit-learn, scipy and the definitions written out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics
from torch.nn import functional

from fedhb.errors import InputError
from fedhb.likelihood import Categorical, GaussianRegression, calibration_error, slope


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- classification


def predictions(n=400, classes=4, seed=0):
    """Probabilities that are right more often than not, and labels."""
    y = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
    logits = normal(n, classes, seed=seed) + 1.5 * functional.one_hot(y, classes)
    return logits.softmax(-1), y


def test_loss_is_cross_entropy_per_example():
    outputs, y = (
        normal(3, 5, 4),
        torch.randint(4, (3, 5), generator=torch.Generator().manual_seed(1)),
    )
    loss = Categorical(4).loss(outputs, y)
    assert loss.shape == (3, 5)
    for c in range(3):
        torch.testing.assert_close(loss[c].mean(), functional.cross_entropy(outputs[c], y[c]))
        for b in range(5):
            torch.testing.assert_close(loss[c, b], -outputs[c, b].log_softmax(0)[y[c, b]])
    torch.testing.assert_close(Categorical(4).predictive(outputs), outputs.softmax(-1))
    assert Categorical(4).num_outputs == 4


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(4),
        GaussianRegression(2, centre=1.0, scale=3.0),
        GaussianRegression(2, centre=(1.0, -40.0), scale=(3.0, 0.1)),
        GaussianRegression(4, noise=0.5),
        GaussianRegression(2, centre=(1.0, -40.0), scale=(3.0, 0.1), gain=0.3),
        GaussianRegression(4, noise=0.5, gain=0.3, most=1e3),
    ],
)
def test_the_slope_is_the_losss_derivative(likelihood):
    outputs, (real, whole) = (
        normal(3, 5, 4),
        (normal(3, 5, likelihood.num_outputs // 2), torch.arange(15).view(3, 5) % 4),
    )
    y = (
        whole
        if isinstance(likelihood, Categorical)
        else real
        if likelihood.noise is None
        else normal(3, 5, 4, seed=7)
    )
    before = outputs.clone()
    found = slope(likelihood, outputs, y)
    expected = torch.func.grad(lambda o: likelihood.loss(o, y).sum())(outputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    assert torch.equal(outputs, before) and not found.requires_grad


def test_slopes_of_far_residuals_are_held():
    """At `most` deviations from the mean they are what they are; beyond it, what they are there."""
    held, plain = GaussianRegression(1, gain=0.5, most=2.0), GaussianRegression(1, gain=0.5)
    outputs = torch.tensor([[1.0, 0.4]], dtype=torch.float64)
    mean, deviation = 0.5, functional.softplus(torch.tensor(0.2, dtype=torch.float64)) + held.floor
    inside, edge, beyond = (
        torch.tensor([mean], dtype=torch.float64) + z * deviation for z in (-1.9, 2.0, 50.0)
    )
    torch.testing.assert_close(slope(held, outputs, inside), slope(plain, outputs, inside))
    torch.testing.assert_close(slope(held, outputs, beyond), slope(plain, outputs, edge))
    assert held.loss(outputs, beyond) == plain.loss(
        outputs, beyond
    )  # what is reported is the density


@pytest.mark.parametrize(
    ("name", "value"), [("gain", 0.0), ("gain", float("nan")), ("most", -1.0), ("gain", (1.0, 2.0))]
)
def test_gain_and_most_are_positive(name, value):
    with pytest.raises(InputError, match=name):
        GaussianRegression(2, **{name: value})


def test_a_loss_of_ones_own_has_its_own_slope():
    class Smooth(Categorical):
        def loss(self, outputs, y):
            return 0.5 * super().loss(outputs, y) - 0.5 * outputs.log_softmax(-1).mean(-1)

    outputs, y = normal(3, 5, 4), torch.arange(15).view(3, 5) % 4
    torch.testing.assert_close(
        slope(Smooth(4), outputs, y), torch.func.grad(lambda o: Smooth(4).loss(o, y).sum())(outputs)
    )


def test_score_is_being_right():
    outputs = torch.tensor([[[2.0, 1.0], [0.0, 1.0], [3.0, 4.0]]])
    assert Categorical(2).score(outputs, torch.tensor([[0, 0, 1]])).tolist() == [[1.0, 0.0, 1.0]]


def test_metrics_are_those_of_scikit_learn():
    p, y = predictions()
    found = Categorical(4).metrics(p, y)
    assert list(found) == ["accuracy", "nll", "brier", "ece"]
    assert found["accuracy"] == pytest.approx(
        sklearn_metrics.accuracy_score(y, p.argmax(1)), abs=1e-12
    )
    assert found["nll"] == pytest.approx(
        sklearn_metrics.log_loss(y, p.numpy(), labels=range(4)), rel=1e-12
    )
    brier = np.mean(
        [sum((p[n, k].item() - (k == y[n].item())) ** 2 for k in range(4)) for n in range(len(y))]
    )
    assert found["brier"] == pytest.approx(brier, rel=1e-12)
    assert found["ece"] == calibration_error(p, y)


def test_a_class_held_impossible_costs_much_but_not_infinitely():
    nll = Categorical(2).metrics(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))["nll"]
    assert 80 < nll < 110  # -log of the least float32 is 87


def explicit_calibration_error(p, y, bins=15):
    """The definition, bin by bin: (low, high]; a confidence of 0 would lie in the first."""
    confidence, guess = p.max(1).values.numpy(), p.argmax(1).numpy()
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            accuracy = np.mean(guess[inside] == y.numpy()[inside])
            total += inside.mean() * abs(accuracy - confidence[inside].mean())
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 4, 10])
def test_calibration_error_is_its_definition(seed, classes):
    p, y = predictions(300, classes, seed)
    assert calibration_error(p, y) == pytest.approx(explicit_calibration_error(p, y), abs=1e-12)


def test_calibration_error_of_known_cases():
    certain = torch.tensor([[1.0, 0.0]] * 4)
    assert calibration_error(certain, torch.tensor([0, 0, 0, 0])) == 0
    assert calibration_error(certain, torch.tensor([0, 0, 1, 1])) == 0.5
    # errors of opposite sign in different bins do not cancel: |1 - 0.55| and |0 - 0.95|, half of
    # the examples each
    p = torch.tensor([[0.55, 0.45], [0.95, 0.05]], dtype=torch.float64)
    assert calibration_error(p, torch.tensor([0, 1])) == pytest.approx(0.5 * 0.45 + 0.5 * 0.95)


def test_probabilities_are_mixed_not_logits():
    each = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]])  # [M, n, classes]
    weights = torch.tensor([[0.25], [0.75]])
    mixed = Categorical(2).average(each, weights)
    torch.testing.assert_close(
        mixed, torch.tensor([[0.25 * 0.9 + 0.75 * 0.2, 0.25 * 0.1 + 0.75 * 0.8]])
    )
    batched = Categorical(2).average(
        each.unsqueeze(1).expand(2, 3, 1, 2), weights.unsqueeze(1).expand(2, 3, 1)
    )
    assert batched.shape == (3, 1, 2) and torch.equal(batched[2], mixed)


# ---- regression

LIKELIHOODS = [
    GaussianRegression(),
    GaussianRegression(2, centre=3.0, scale=2.5),
    GaussianRegression(2, centre=-1.0, scale=0.5, noise=0.7),
    GaussianRegression(3, centre=(3.0, -500.0, 0.0), scale=(2.5, 100.0, 1e-3)),
    GaussianRegression(2, centre=(-1.0, 20.0), scale=(0.5, 30.0), noise=(0.7, 4.0)),
    GaussianRegression(2, centre=0.3, scale=(0.5, 30.0), noise=2.0),
]


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_loss_and_nll_are_those_of_scipy(likelihood):
    q = likelihood.num_targets
    centre, scale = (np.broadcast_to(value, q) for value in (likelihood.centre, likelihood.scale))
    outputs, y = (
        normal(2, 6, likelihood.num_outputs),
        torch.tensor(scale) * normal(2, 6, q, seed=1) + torch.tensor(centre),
    )
    mean = outputs[..., :q].numpy() * scale + centre
    if likelihood.noise is None:
        deviation = scale * (np.logaddexp(0, outputs[..., q:].numpy()) + likelihood.floor)
    else:
        deviation = np.broadcast_to(likelihood.noise, mean.shape)
    expected = -stats.norm.logpdf(y.numpy(), mean, deviation).sum(-1)
    # training loss: the same, less the constant that the units of y bring in
    np.testing.assert_allclose(
        likelihood.loss(outputs, y).numpy(), expected - np.log(scale).sum(), rtol=1e-10
    )
    prediction = likelihood.predictive(outputs)
    assert prediction.shape == (2, 6, 2, q)
    np.testing.assert_allclose(prediction[..., 0, :], mean, rtol=1e-12)
    np.testing.assert_allclose(prediction[..., 1, :], deviation**2, rtol=1e-12)
    found = likelihood.metrics(prediction[0], y[0])
    assert list(found) == ["rmse", "nll", "coverage"]
    assert found["nll"] == pytest.approx(expected[0].mean(), rel=1e-10)
    assert found["rmse"] == pytest.approx(
        sklearn_metrics.root_mean_squared_error(y[0].numpy().ravel(), mean[0].ravel())
    )
    low, high = stats.norm.interval(0.9, mean[0], deviation[0])
    assert found["coverage"] == pytest.approx(
        ((y[0].numpy() >= low) & (y[0].numpy() <= high)).mean()
    )
    np.testing.assert_allclose(likelihood.score(outputs, y), np.square(y.numpy() - mean).mean(-1))


def test_targets_may_come_without_an_axis_of_their_own():
    likelihood = GaussianRegression()
    outputs, y = normal(2, 6, 2), normal(2, 6, seed=1)
    assert torch.equal(likelihood.loss(outputs, y), likelihood.loss(outputs, y.unsqueeze(-1)))
    prediction = likelihood.predictive(outputs[0])
    assert likelihood.metrics(prediction, y[0]) == likelihood.metrics(
        prediction, y[0].unsqueeze(-1)
    )


def test_a_mixture_has_the_moments_of_its_samples():
    likelihood = GaussianRegression()
    means, variances = torch.tensor([-2.0, 0.5, 3.0]), torch.tensor([0.5, 2.0, 1.0])
    weights = torch.tensor([0.2, 0.5, 0.3])
    each = torch.stack([means, variances], dim=-1).double().view(3, 1, 2, 1)
    mixed = likelihood.average(each, weights.double().view(3, 1))[0, :, 0]
    rng = np.random.default_rng(0)
    draws = 200_000
    which = rng.choice(3, draws, p=weights.double().numpy() / weights.double().sum().item())
    x = rng.normal(means.numpy()[which], np.sqrt(variances.numpy()[which]))
    # five standard errors: the variance of the squares is at most 8 times the squared variance here
    assert abs(mixed[0] - x.mean()) < 5 * x.std() / draws**0.5
    assert abs(mixed[1] - x.var()) < 5 * x.var() * (8 / draws) ** 0.5
    exact = (weights * (variances + means**2)).sum() - (weights * means).sum() ** 2
    assert mixed[1].item() == pytest.approx(exact.item(), rel=1e-6)


def test_a_mixture_far_from_zero_keeps_its_variance():
    each = torch.tensor([[1e6, 1.0], [1e6 + 2, 1.0]], dtype=torch.float64).view(2, 1, 2, 1)
    mixed = GaussianRegression().average(each, torch.full((2, 1), 0.5, dtype=torch.float64))
    assert mixed[0, :, 0].tolist() == [1e6 + 1, 2.0]


def test_intervals_of_the_true_model_cover_nine_in_ten():
    likelihood = GaussianRegression(centre=5.0, scale=2.0)
    outputs = normal(20_000, 2)
    prediction = likelihood.predictive(outputs)
    y = prediction[:, 0] + prediction[:, 1].sqrt() * normal(20_000, 1, seed=1)
    coverage = likelihood.metrics(prediction, y)["coverage"]
    assert abs(coverage - 0.9) < 0.011  # five standard errors
    doubled = torch.stack([prediction[:, 0], 4 * prediction[:, 1]], dim=1)
    assert likelihood.metrics(doubled, y)["coverage"] > 0.99


@given(
    st.tuples(st.floats(-100, 100), st.floats(-100, 100)),
    st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    st.sampled_from([None, 0.5]),
)
def test_each_targets_unit_changes_its_predictions_but_not_the_loss(centre, scale, noise):
    plain = GaussianRegression(2, noise=noise)
    moved = GaussianRegression(
        2,
        centre=centre,
        scale=scale,
        noise=None if noise is None else tuple(noise * s for s in scale),
    )
    outputs, y = normal(1, 8, plain.num_outputs), normal(1, 8, 2, seed=1)
    centre, scale = (torch.tensor(value, dtype=torch.float64) for value in (centre, scale))
    torch.testing.assert_close(
        moved.loss(outputs, y * scale + centre), plain.loss(outputs, y), rtol=1e-9, atol=1e-9
    )
    one, other = plain.predictive(outputs), moved.predictive(outputs)
    torch.testing.assert_close(other[..., 0, :], one[..., 0, :] * scale + centre)
    torch.testing.assert_close(other[..., 1, :], one[..., 1, :] * scale**2)
    before, after = plain.metrics(one[0], y[0]), moved.metrics(other[0], y[0] * scale + centre)
    error = (one[0, :, 0] - y[0]) * scale
    assert after["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-6)
    assert after["nll"] == pytest.approx(before["nll"] + scale.log().sum().item(), abs=1e-6)
    assert after["coverage"] == before["coverage"]


def test_noise_has_a_floor():
    likelihood = GaussianRegression(scale=2.0)
    variance = likelihood.predictive(torch.tensor([[0.0, -1e4]]))[0, 1, 0]
    assert variance.item() == pytest.approx((2.0 * 1e-3) ** 2)
    assert torch.isfinite(likelihood.loss(torch.tensor([[[0.0, -1e4]]]), torch.zeros(1, 1))).all()


def test_each_targets_noise_has_a_floor_of_its_own():
    likelihood = GaussianRegression(2, scale=(2.0, 1e-6))
    variance = likelihood.predictive(torch.tensor([[0.0, 0.0, -1e4, -1e4]]))[0, 1]
    assert variance.tolist() == pytest.approx([(2.0 * 1e-3) ** 2, (1e-6 * 1e-3) ** 2])


@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_number_is_the_same_number_for_every_target(noise, dtype):
    one = GaussianRegression(2, centre=0.1, scale=0.7, noise=noise)
    each = GaussianRegression(
        2, centre=(0.1, 0.1), scale=[0.7, 0.7], noise=None if noise is None else (noise, noise)
    )
    assert each.scale == (0.7, 0.7)
    outputs, y = normal(2, 6, one.num_outputs).to(dtype), normal(2, 6, 2, seed=1).to(dtype)
    assert torch.equal(each.loss(outputs, y), one.loss(outputs, y)) and torch.equal(
        each.predictive(outputs), one.predictive(outputs)
    )
    draws = [
        likelihood.sample(outputs[0], torch.Generator().manual_seed(3))
        for likelihood in (one, each)
    ]
    assert torch.equal(*draws)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"scale": 0.0},
            "scale=0.0.*num_targets=2.*tuple",
        ),
        ({"scale": (1.0, -1.0)}, "positive"),
        ({"scale": (1.0, 2.0, 3.0)}, r"scale=\(1.0, 2.0, 3.0\).*num_targets=2"),
        ({"scale": ()}, "num_targets=2"),
        ({"scale": None}, "scale=None"),
        ({"centre": (1.0, float("nan"))}, "centre=.*finite"),
        ({"centre": "ab"}, "centre='ab'"),
        ({"centre": ("a", "b")}, "finite"),
        ({"centre": 10**400}, "finite"),
        ({"centre": [[1.0, 2.0], [1.0, 2.0]]}, "finite"),
        ({"noise": (0.0, 1.0)}, "noise="),
        ({"noise": float("inf")}, "noise=inf"),
        ({"num_targets": 0}, "num_targets=0"),
    ],
)
def test_numbers_that_no_targets_have_are_refused(values, says):
    with pytest.raises(InputError, match=says):
        GaussianRegression(**{"num_targets": 2} | values)


def test_the_number_of_outputs():
    assert GaussianRegression(3).num_outputs == 6
    assert dataclasses.replace(GaussianRegression(3), noise=1.0).num_outputs == 3
