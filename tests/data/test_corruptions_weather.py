"""Fog, frost, snow and spatter: their strength follows from their constants."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from pictures import constant, spy_on, textured

from fedhb.data import corruptions
from fedhb.data.corruptions import corrupt
from fedhb.errors import InputError


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Frost without the extra package: pictures of known colour."""
    monkeypatch.setattr(
        corruptions,
        "frost_pictures",
        lambda: [np.full((63, 112, 3), shade) for shade in (0.2, 0.8)],
    )


def test_fog_adds_a_cloud_and_keeps_the_largest_value(monkeypatch):
    cloud = corruptions.plasma([np.random.default_rng(k) for k in range(40)], 1.75)
    assert cloud.shape == (40, 32, 32) and cloud.min() == 0 and cloud.max() == 1
    # amplitudes fall by 1.75^2 with each of four halvings: what the first step adds to the middle,
    # uniform in -1..1, is 1.75^8 times what the last step adds between four pixels, whose root mean
    # square is 1/sqrt(3)
    cloud = corruptions.plasma([np.random.default_rng(k) for k in range(400)], 1.75)
    corners = cloud[:, ::2, ::2] + np.roll(cloud[:, ::2, ::2], -1, axis=1)
    fine = cloud[:, 1::2, 1::2] - (corners + np.roll(corners, -1, axis=2)) / 4
    ratio = np.abs(cloud[:, 16, 16] - cloud[:, 0, 0]) / np.sqrt((fine**2).mean(axis=(1, 2)))
    assert ratio.mean() == pytest.approx(
        0.5 * 3**0.5 * 1.75**8, rel=0.1
    )  # three standard errors of a uniform's mean
    spied = spy_on(monkeypatch, "plasma")
    corrupt("fog", constant(100))
    assert spied[0][1:] == (1.75,)
    found = corrupt("fog", constant(200, 40)).astype(float)
    top, plain = 200 / 255, 200 / 255 * 200 / 255 / (200 / 255 + 1.5)
    assert found.min() / 255 == pytest.approx(plain, abs=0.005)
    assert found.max() / 255 == pytest.approx((top + 1.5) * top / (top + 1.5), abs=0.005)
    assert (found[..., 0] == found[..., 2]).all()


def test_frost_mixes_three_quarters_with_a_picture():
    images = textured(8)
    found = corrupt("frost", images)
    shades = {0.2: 0, 0.8: 0}
    for one, before in zip(found, images, strict=True):
        fits = [
            s
            for s in shades
            if abs(one - np.clip(np.floor(0.75 * before + 0.45 * 255 * s + 1e-6), 0, 255)).max()
            <= 1
        ]
        assert len(fits) == 1
        shades[fits[0]] += 1
    assert all(shades.values())


def test_the_photographs_of_frost(monkeypatch):
    if importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the extra `corruptions` is not installed")
    monkeypatch.undo()
    found = corruptions.frost_pictures()
    assert [one.shape[:2] for one in found] == [
        (120, 180),
        (63, 112),
        (63, 112),
        (70, 105),
        (99, 132),
    ]
    assert all(0 <= one.min() < one.max() <= 1 for one in found)


def test_frost_without_its_photographs_says_how_to_get_them(monkeypatch):
    monkeypatch.undo()
    corruptions.frost_pictures.cache_clear()
    monkeypatch.setattr(corruptions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"fedhb\[corruptions\]"):
        corrupt("frost", constant(0))


def test_snow_has_its_constants(monkeypatch):
    magnified, trails = spy_on(monkeypatch, "_magnify"), spy_on(monkeypatch, "_trail")
    corrupt("snow", constant(0, 60))
    noise, zoom = magnified[0]
    assert (
        zoom == 1.25
        and noise.mean() == pytest.approx(0.3, abs=0.005)
        and noise.std() == pytest.approx(0.3, rel=0.01)
    )
    flakes, angles, radius, sigma = trails[0]
    assert (
        (radius, sigma) == (14, 12.0)
        and min(angles) < -120
        and max(angles) > -60
        and all(-135 < a < -45 for a in angles)
    )
    assert 0.64 < flakes[flakes > 0].min() < 0.66 and flakes.max() == 1


def test_snow_pales_colours_towards_their_brightness(monkeypatch):
    """Between the flakes 0.8 x + 0.2 max(x, 1.5 grey + 0.5), with the brightness of red, green and
    blue.
    """
    monkeypatch.setattr(corruptions, "_trail", lambda flakes, *_: 0 * flakes)
    images = textured()
    x = images / 255
    grey = 0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2]
    expected = np.clip(0.8 * x + 0.2 * np.maximum(x, 1.5 * grey[..., None] + 0.5), 0, 1)
    assert abs(corrupt("snow", images) + 0.5 - 255 * expected).max() <= 0.501


def test_snow_falls_steeply_on_a_paler_image():
    found = corrupt("snow", constant(0, 60)).astype(float)[..., 0] / 255
    # black: 0.8 * 0 + 0.2 * 0.5 without a flake; two layers of flakes above 0.65, smeared
    assert found.min() == pytest.approx(0.1, abs=0.004)
    flakes = found - 0.1
    along, across = np.abs(np.diff(flakes, axis=1)).mean(), np.abs(np.diff(flakes, axis=2)).mean()
    assert along < 0.8 * across  # they fall
    # P(0.3 + 0.3 z > 0.65) E[.|.] = 0.09, less what interpolation takes off; twice, less what is
    # cut at 1
    assert 0.02 < flakes.mean() < 0.25
    assert (found[:, ::-1, ::-1] == found).all()  # from both sides


def test_spatter_is_mud(monkeypatch):
    spied = spy_on(monkeypatch, "_smooth")
    found = corrupt("spatter", constant(255, 40)).astype(float)
    mud = np.array([63, 42, 20])
    hit = (found != 255).any(-1)
    assert 0.02 < hit.mean() < 0.35
    # m in 0.8..1 of mud, the rest of white noise of deviation 0.1, smoothed by 0.5: times
    # sqrt(0.41), so that z > (0.68 - 0.65) / 0.064 for 32 % of all pixels
    (_, first), (above, second) = spied
    assert (first, second) == (0.5, 0.6) and above.mean() == pytest.approx(0.32, abs=0.012)
    share = (255 - found[hit]) / (255 - mud)
    assert share.min() > 0.79 and share.max() <= 1.01 and np.ptp(share, axis=1).max() < 0.02
