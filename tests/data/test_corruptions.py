"""The corruptions: each one's strength against what follows from its constants."""

from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
from pictures import constant, spy_on, textured
from scipy import ndimage

from fedhb.data import corruptions
from fedhb.data.corruptions import CORRUPTIONS, corrupt
from fedhb.errors import InputError

Image = pytest.importorskip("PIL.Image")


def point():
    """One white pixel in the middle of black: its blur is the kernel."""
    picture = constant(0)
    picture[0, 16, 16] = 255
    return picture


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Frost without the extra package: pictures of known colour."""
    monkeypatch.setattr(
        corruptions,
        "frost_pictures",
        lambda: [np.full((63, 112, 3), shade) for shade in (0.2, 0.8)],
    )


def test_there_are_nineteen():
    assert len(CORRUPTIONS) == 19 == len({name for name in CORRUPTIONS if name.islower()})


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_same_shape_same_type_and_the_image_is_changed(name):
    images = textured()
    before = images.copy()
    found = corrupt(name, images)
    assert found.shape == images.shape and found.dtype == np.uint8
    assert (images == before).all() and (found != images).mean() > 0.02


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_depends_on_its_number_alone(name):
    images = textured(5)
    whole = corrupt(name, images, first=7)
    assert (whole == corrupt(name, images, first=7)).all()
    parts = [corrupt(name, images[:2], first=7), corrupt(name, images[2:], first=9)]
    assert (whole == np.concatenate(parts)).all()
    assert (whole[3] == corrupt(name, images[3], first=10)).all()


RANDOM = [
    name
    for name in CORRUPTIONS
    if name
    not in (
        "gaussian_blur", "defocus_blur", "zoom_blur", "brightness", "contrast", "saturate", "jpeg_compression", "pixelate",
    )
]  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_have_randomness_of_their_own(name):
    images = np.repeat(textured(1), 6, axis=0)
    found = corrupt(name, images)
    different = len({one.tobytes() for one in found})
    assert different > 1 if name in RANDOM else different == 1


@pytest.mark.parametrize("value", [0, 90, 255])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_constant_image(name, value):
    found = corrupt(name, constant(value, 3)).astype(int)
    still = (
        "gaussian_blur",
        "glass_blur",
        "defocus_blur",
        "motion_blur",
        "zoom_blur",
        "contrast",
        "pixelate",
        "elastic_transform",
    )
    if name in still:
        assert abs(found - value).max() <= 1  # cut, not rounded
    elif name == "jpeg_compression":
        assert abs(found - value).max() <= 2
    elif name == "shot_noise" and value == 0:
        assert (found == 0).all()  # no light, no noise
    elif name in ("fog", "speckle_noise") and value == 0:
        assert (found == 0).all()
    elif name == "brightness":
        assert (found == min(value + 76, 255)).all()  # 0.3 of 255 is 76.5
    elif name == "saturate":
        assert (found[..., 0] == value).all() and abs(found[..., 1:] - 0.8 * value).max() < 1
    elif name == "snow":
        assert (found >= 0.8 * value).all() and (value == 255 or (found > value).mean() > 0.5)
    else:
        assert (found != value).any()  # what it looks like is tested below


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, 3, 32, 32), np.uint8), "colours last"),
        (np.zeros((1, 32, 32, 3)), "float64"),
        (np.zeros((1, 28, 28, 3), np.uint8), "28"),
    ],
)
def test_other_images_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        corrupt("fog", images)
    with pytest.raises(InputError, match="'mist'"):
        corrupt("mist", constant(0))


def moments(name, value):
    found = corrupt(name, constant(value, 20)) + 0.5  # back to the middle of what was cut
    return found.mean() / 255, found.var() / 255**2


def test_gaussian_noise_has_its_deviation():
    mean, variance = moments("gaussian_noise", 127)
    assert mean == pytest.approx(127 / 255, abs=3e-3) and variance == pytest.approx(
        0.10**2, rel=0.02
    )


@pytest.mark.parametrize("value", [40, 80, 127])
def test_shot_noise_is_poisson(value):
    mean, variance = moments("shot_noise", value)
    assert mean == pytest.approx(value / 255, abs=4e-3)
    assert variance == pytest.approx(value / 255 / 50, rel=0.03)


@pytest.mark.parametrize("value", [60, 120])
def test_speckle_noise_grows_with_the_image(value):
    mean, variance = moments("speckle_noise", value)
    assert mean == pytest.approx(value / 255, abs=3e-3) and variance == pytest.approx(
        (0.2 * value / 255) ** 2, rel=0.02
    )


def test_impulse_noise_is_salt_and_pepper():
    found = corrupt("impulse_noise", constant(100, 200))
    for value in (0, 255):
        assert (found == value).mean() == pytest.approx(0.035, abs=0.0007)  # three standard errors
    assert set(np.unique(found)) == {0, 100, 255}
    one = corrupt("impulse_noise", constant(100))[0]
    assert ((one != 100).any(-1) & (one == 100).any(-1)).any()  # colours are hit one by one


def spread(kernel):
    """The mean place and the second moments of a kernel [32, 32], in pixels."""
    axis = np.arange(32) - 16
    mass = kernel / kernel.sum()
    rows, columns = mass.sum(1), mass.sum(0)
    return rows @ axis, columns @ axis, rows @ axis**2, columns @ axis**2


def test_gaussian_blur_has_its_second_moment():
    found = CORRUPTIONS["gaussian_blur"](point() / 255.0, [])[0, ..., 0]
    row, column, rows, columns = spread(found)
    assert (row, column) == (pytest.approx(0, abs=1e-9),) * 2
    assert (
        rows == pytest.approx(1.0, rel=0.01)
        and columns == pytest.approx(1.0, rel=0.01)
        and found.sum() == pytest.approx(1)
    )


def test_defocus_blur_is_the_mean_over_its_disk():
    # x^2 + y^2 <= 1.5^2 holds for the 3 x 3 pixels around the centre, and the edge's smoothing is
    # exp(-50)
    assert corruptions.disk(1.5, 0.1)[1:-1, 1:-1] == pytest.approx(
        np.full((3, 3), 1 / 9), abs=1e-12
    )
    assert corruptions.disk(2.5, 0.5).sum() == pytest.approx(1)
    images = textured(1)
    expected = ndimage.uniform_filter(images / 255.0, (1, 3, 3, 1), mode="mirror") * 255
    assert abs(corrupt("defocus_blur", images) + 0.5 - expected).max() <= 0.51


def test_glass_blur_moves_colours_up_to_a_pixel_at_a_time_and_invents_none():
    images = constant(0, 50)
    images[:, 16, 16] = 255
    found = CORRUPTIONS["glass_blur"](
        images / 255.0, [np.random.default_rng(k) for k in range(50)]
    )[..., 0]
    # smoothing twice by 0.4 adds 2 * 0.4^2 at most; a colour moves down and right only, by chains
    # of copies
    mean = found.sum(axis=0)
    row, column, _, _ = spread(mean)
    assert 0.5 < row < 2.5 and 0.5 < column < 2.5
    assert mean[:14].sum() + mean[:, :14].sum() < 1e-3 * mean.sum()
    # In each of two passes a pixel takes the row above it or stays, with equal chances: it moves by
    # 1 on average, with variance 0.5, of which smoothing by 0.4 leaves (0.92^2 + 2 0.04^2)^2 = 0.72
    # where neighbours move independently, and more where not.
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None] * 8, (10, 32, 32, 3)).copy()
    moved = (ramp.astype(float) - corrupt("glass_blur", ramp) - 0.5)[:, 4:-4, 4:-4, 0] / 8
    assert moved.mean() == pytest.approx(1.0, abs=0.05) and 0.36 < moved.var() < 0.5


def test_motion_blur_is_half_a_gaussian_along_its_angle():
    for seed in range(5):
        rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
        found = CORRUPTIONS["motion_blur"](point() / 255.0, [rng])[0, ..., 0]
        angle = np.deg2rad(again.uniform(-45, 45))
        distance = np.arange(19)
        weights = np.exp(-(distance**2) / (2 * 2.5**2))
        length = distance @ weights / weights.sum()  # the mean of half a Gaussian
        row, column, _, _ = spread(found)
        # what a pixel gathers from one side, a point spreads to the other
        assert row == pytest.approx(-length * np.sin(angle), abs=0.35)
        assert column == pytest.approx(-length * np.cos(angle), abs=0.35)
        assert found.sum() == pytest.approx(1, abs=0.04)


def test_motion_blur_has_its_constants(monkeypatch):
    trails = spy_on(monkeypatch, "_trail")
    corrupt("motion_blur", constant(0, 300))
    _, angles, radius, sigma = trails[0]
    assert (radius, sigma) == (9, 2.5) and -45 <= min(angles) < -44 and 44 < max(angles) <= 45


def test_zoom_blur_leaves_the_middle_and_smears_the_edge_outward():
    block = constant(0)
    block[0, 13:19, 13:19] = 255
    assert corrupt("zoom_blur", block)[0, 15:17, 15:17].min() >= 254
    edge = constant(0)
    edge[0, :, 26] = (
        255  # 10.5 pixels from the centre: 10.5 * 1.25 = 13.1 when magnified, and half a line and a pixel more
    )
    found = corrupt("zoom_blur", edge)[0, 16, :, 0].astype(float)
    assert found[:25].max() == 0 and found[31:].max() == 0 and found[26:30].min() > 255 / 27
    assert found.sum() == pytest.approx(
        255 * 1.13, rel=0.12
    )  # a magnified line is as bright, and wider
    x = textured(1) / 255.0
    every = [corruptions._magnify(x, factor) for factor in np.linspace(1, 1.25 + 1e-15, 26)]
    assert CORRUPTIONS["zoom_blur"](x, []) == pytest.approx((x + sum(every)) / 27, abs=1e-12)


def test_contrast_shrinks_every_colour_towards_its_mean():
    images = textured()
    found = corrupt("contrast", images) + 0.5
    for one, before in zip(found, images, strict=True):
        assert one.mean((0, 1)) == pytest.approx(before.mean((0, 1)), abs=0.6)
        assert one.std((0, 1)) == pytest.approx(0.15 * before.std((0, 1)), rel=0.05)


@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colours_move_in_hsv(name):
    images = textured(1)
    images[0, 0, :3] = [[0, 0, 0], [90, 90, 90], [255, 255, 255]]
    found = corrupt(name, images)[0]
    for before, after in zip(images[0].reshape(-1, 3)[::7], found.reshape(-1, 3)[::7], strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before / 255.0)
        if name == "brightness":
            value = min(value + 0.3, 1)
        else:
            saturation = min(2.5 * saturation + 0.2, 1)
        assert (
            abs(np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255 - after).max() < 1.001
        )


def test_jpeg_is_what_pillow_writes_at_quality_40():
    images = textured(2)
    for one, before in zip(corrupt("jpeg_compression", images), images, strict=True):
        file = io.BytesIO()
        Image.fromarray(before).save(file, "JPEG", quality=40)
        assert (one == np.asarray(Image.open(file))).all()


def test_pixelate_has_twenty_steps():
    images = np.random.default_rng(0).integers(0, 256, size=(1, 32, 32, 3)).astype(np.uint8)
    found = corrupt("pixelate", images)[0].astype(int)
    same = (found[1:] == found[:-1]).all((1, 2))
    assert same.sum() == 32 - 20  # 32 rows show 20
    assert (
        found.mean() == pytest.approx(images.mean(), abs=2.5) and found.var() < 0.6 * images.var()
    )


def test_elastic_displacements_are_bounded_and_of_the_right_size():
    # a ramp in x tells how far each pixel moved; the affine map is affine, so what is left of a
    # plane is the noise
    count = 200
    x = np.broadcast_to(np.linspace(0, 1, 32)[:, None], (count, 32, 32, 1))
    found = (
        CORRUPTIONS["elastic_transform"](x, [np.random.default_rng(k) for k in range(count)])[
            ..., 0
        ]
        * 31
    )
    inner = slice(6, 26)
    moved = (found - np.arange(32))[:, inner, inner]
    assert (
        np.abs(moved).max() < 3.2 + 4
    )  # the noise, and the affine map with its three points moved by up to 0.96
    rows, columns = np.mgrid[inner, inner].reshape(2, -1)
    plane = np.stack([np.ones_like(rows), rows, columns], axis=1)
    rest = moved.reshape(count, -1).T
    fitted = np.linalg.lstsq(plane, rest, rcond=None)[0]
    # the affine map moves (row, column) = (26, 26), (6, 26) and (6, 6) by a uniform of 0.96 in
    # either direction
    corners = np.array([[1, 26, 26], [1, 6, 26], [1, 6, 6]]) @ fitted
    assert corners.std() == pytest.approx(0.96 / 3**0.5, rel=0.12)
    rest = rest - plane @ fitted
    # uniform noise of variance 1/3, smoothed by sigma = 0.96: divided by 4 pi sigma^2 = 11.6
    assert rest.std() == pytest.approx(3.2 * (1 / 3 / (4 * np.pi * 0.96**2)) ** 0.5, rel=0.1)


def test_elastic_noise_is_smoothed_as_scipy_does(monkeypatch):
    """Each pixel moves by 3.2 times uniform noise, smoothed by 0.96 over three deviations, mirrored
    at the edge.
    """
    places = spy_on(monkeypatch, "_at")
    CORRUPTIONS["elastic_transform"](
        textured(3) / 255, [np.random.default_rng(k) for k in range(3)]
    )
    _, rows, columns, repeat = places[1]
    assert repeat
    for k in range(3):
        rng = np.random.default_rng(k)
        rng.uniform(size=(3, 2))  # the three points of the affine map come first
        noise = rng.uniform(-1, 1, size=(2, 32, 32))
        across, down = (
            3.2 * ndimage.gaussian_filter(one, 0.96, truncate=3, mode="reflect") for one in noise
        )
        assert rows[k] - np.arange(32)[:, None] == pytest.approx(down, abs=1e-12)
        assert columns[k] - np.arange(32) == pytest.approx(across, abs=1e-12)


@pytest.mark.parametrize(("repeat", "mode"), [(False, "mirror"), (True, "reflect")])
def test_interpolation_is_scipys(repeat, mode):
    rng = np.random.default_rng(3)
    x = rng.random((2, 32, 32, 3))
    rows, columns = rng.uniform(-9, 41, size=(2, 2, 32, 32))
    found = corruptions._at(x, rows, columns, repeat)
    for k in range(2):
        for colour in range(3):
            expected = ndimage.map_coordinates(
                x[k, ..., colour], [rows[k], columns[k]], order=1, mode=mode
            )
            assert found[k, ..., colour] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.2, 1.25])
def test_magnification_is_scipys(factor):
    x = np.random.default_rng(4).random((2, 32, 32, 3))
    size = int(np.ceil(32 / factor))
    middle = x[:, (32 - size) // 2 :, (32 - size) // 2 :][:, :size, :size]
    expected = ndimage.zoom(middle, (1, factor, factor, 1), order=1)
    top = (expected.shape[1] - 32) // 2
    assert corruptions._magnify(x, factor) == pytest.approx(
        expected[:, top : top + 32, top : top + 32], abs=1e-12
    )
