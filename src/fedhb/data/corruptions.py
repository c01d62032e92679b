"""The nineteen corruptions of CIFAR-10-C and CIFAR-100-C at severity 5, for RGB images of 32 x 32.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019; the
constants are those of their CIFAR data sets, in pixels of 32 x 32, not those of ImageNet. Every image has randomness of its own,
from the corruption's name and the image's number: neither the batch nor the process that it is made in shows in the result.

A corruption maps images x [n, 32, 32, 3] in 0..1, and a generator for each, to images in 0..1. The published files were cut to
whole numbers, not rounded, and so are these.
"""

from __future__ import annotations

import importlib.util
import io
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedhb.errors import InputError

SIZE = 32
Rngs = Sequence[np.random.Generator]

GREY = np.array([0.299, 0.587, 0.114])
"""What the colours count in the brightness of a pixel."""
MUD = np.array([63, 42, 20]) / 255
FROST_PICTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""Those that the published data were made with, of six that there are."""


def corrupt(name: str, images: np.ndarray, first: int = 0) -> np.ndarray:
    """Corrupt images.

    Args:
        name: one of `CORRUPTIONS`.
        images: uint8 [n, 32, 32, 3], or one [32, 32, 3].
        first: the number of the first image; the others count on. It decides the randomness.

    Returns:
        uint8, of the same shape.
    """
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption {name!r}: choose from {', '.join(CORRUPTIONS)}")
    if (
        images.dtype != np.uint8
        or images.shape[-3:] != (SIZE, SIZE, 3)
        or images.ndim not in (3, 4)
    ):
        raise InputError(
            f"images of type {images.dtype} and shape {images.shape}: give uint8 [n, {SIZE}, {SIZE}, 3], colours last, "
            "because the constants are for this size"
        )
    batch = images if images.ndim == 4 else images[None]
    rngs = [
        np.random.default_rng([zlib.crc32(name.encode()), first + k]) for k in range(len(batch))
    ]
    found = CORRUPTIONS[name](batch / 255.0, rngs)
    # 1e-6: a whole number may come out a hair below itself
    return (np.clip(found, 0, 1) * 255 + 1e-6).astype(np.uint8).reshape(images.shape)


# ---- noise


def gaussian_noise(x: np.ndarray, rngs: Rngs, deviation: float = 0.10) -> np.ndarray:
    """x + deviation z."""
    return x + deviation * _draw(rngs, lambda rng: rng.standard_normal(x.shape[1:]))


def shot_noise(x: np.ndarray, rngs: Rngs, rate: float = 50.0) -> np.ndarray:
    """Poisson(rate x) / rate: mean x, variance x / rate."""
    return np.stack([rng.poisson(one * rate) for one, rng in zip(x, rngs, strict=True)]) / rate


def impulse_noise(x: np.ndarray, rngs: Rngs, share: float = 0.07) -> np.ndarray:
    """This share of all values becomes 0 or 1, each as often."""
    drawn = _draw(rngs, lambda rng: rng.random(x.shape[1:]))
    return np.where(drawn < share, np.where(drawn < share / 2, 0.0, 1.0), x)


def speckle_noise(x: np.ndarray, rngs: Rngs, deviation: float = 0.2) -> np.ndarray:
    """x (1 + deviation z)."""
    return x * (1 + deviation * _draw(rngs, lambda rng: rng.standard_normal(x.shape[1:])))


# ---- blur


def gaussian_blur(x: np.ndarray, rngs: Rngs, sigma: float = 1.0) -> np.ndarray:
    """A Gaussian kernel of this deviation, cut at four of them."""
    return _smooth(x, sigma)


def glass_blur(
    x: np.ndarray, rngs: Rngs, sigma: float = 0.4, shift: int = 1, passes: int = 2
) -> np.ndarray:
    """Smoothed, then every pixel takes the colour of one up to `shift` above and to the left of it, and smoothed again.

    From the last pixel to the first, so that colours wander. The published code means to swap two pixels, but writes one over
    the other before it reads it.
    """
    picture = (np.clip(_smooth(x, sigma), 0, 1) * 255 + 1e-6).astype(np.uint8)
    places = range(SIZE - shift, shift, -1)
    steps = _draw(
        rngs, lambda rng: rng.integers(-shift, shift, size=(passes, len(places), len(places), 2))
    )
    who = np.arange(len(x))
    for turn in range(passes):
        for i, row in enumerate(places):
            for j, column in enumerate(places):
                up, left = steps[:, turn, i, j].T
                picture[:, row, column] = picture[who, row + up, column + left]
    return _smooth(picture / 255.0, sigma)


def defocus_blur(x: np.ndarray, rngs: Rngs, radius: float = 1.5, alias: float = 0.1) -> np.ndarray:
    """The mean over a disk, whose edge is smoothed by a Gaussian of deviation `alias` over 3 x 3 pixels."""
    from scipy import ndimage

    return ndimage.correlate(x, disk(radius, alias)[None, :, :, None], mode="mirror")


def disk(radius: float, alias: float) -> np.ndarray:
    """The kernel of `defocus_blur`, which sums to one."""
    from scipy import ndimage

    axis = np.arange(-8, 9)
    flat = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(float)
    edge = np.exp(-0.5 * np.square([-1.0, 0.0, 1.0]) / alias**2)
    edge /= edge.sum()
    smooth = ndimage.correlate1d(ndimage.correlate1d(flat / flat.sum(), edge, axis=0), edge, axis=1)
    used = np.abs(axis) <= int(radius) + 1
    return smooth[np.ix_(used, used)]


def motion_blur(x: np.ndarray, rngs: Rngs, radius: int = 9, sigma: float = 2.5) -> np.ndarray:
    """A trail to one side, at an angle between -45 and 45 degrees of the rows; rounded, as the published code's library does."""
    return np.round(_trail(x, [rng.uniform(-45, 45) for rng in rngs], radius, sigma) * 255) / 255


def zoom_blur(x: np.ndarray, rngs: Rngs, below: float = 1.26, step: float = 0.01) -> np.ndarray:
    """The mean of the image and of its magnifications by 1, 1.01, ..., 1.25."""
    factors = np.arange(
        1, below, step
    )  # the last a hair above 1.25, which decides how the size is rounded
    return (x + sum(_magnify(x, factor) for factor in factors)) / (len(factors) + 1)


# ---- weather


def fog(x: np.ndarray, rngs: Rngs, strength: float = 1.5, decay: float = 1.75) -> np.ndarray:
    """(x + strength plasma) m / (m + strength), with m the image's largest value."""
    top = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + strength * plasma(rngs, decay)[..., None]) * top / (top + strength)


def plasma(rngs: Rngs, decay: float) -> np.ndarray:
    """A cloud [n, 32, 32] in 0..1 by the diamond-square algorithm on a torus; with every halving noise falls by decay^2."""
    cloud = np.zeros((len(rngs), SIZE, SIZE))
    step, amplitude = SIZE, 100.0
    while step >= 2:
        half, cells = step // 2, SIZE // step
        jolts = amplitude**2 * _draw(rngs, lambda rng, n=cells: rng.uniform(-1, 1, size=(3, n, n)))  # type: ignore[misc]
        corners = cloud[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        centres = (pairs + np.roll(pairs, -1, axis=2)) / 4 + jolts[:, 0]
        cloud[:, half::step, half::step] = centres
        across = centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=2)
        down = centres + np.roll(centres, 1, axis=2) + corners + np.roll(corners, -1, axis=1)
        cloud[:, ::step, half::step] = across / 4 + jolts[:, 1]
        cloud[:, half::step, ::step] = down / 4 + jolts[:, 2]
        step, amplitude = half, amplitude / decay
    cloud -= cloud.min(axis=(1, 2), keepdims=True)
    return cloud / cloud.max(axis=(1, 2), keepdims=True)


def frost(x: np.ndarray, rngs: Rngs, kept: float = 0.75, added: float = 0.45) -> np.ndarray:
    """kept x + added frost, a piece of one of five photographs of frost at a fifth of their size."""
    pictures = frost_pictures()
    pieces = []
    for rng in rngs:
        picture = pictures[rng.integers(len(pictures))]
        row, column = (rng.integers(size - SIZE) for size in picture.shape[:2])
        pieces.append(picture[row : row + SIZE, column : column + SIZE])
    return kept * x + added * np.stack(pieces)


@lru_cache(maxsize=1)
def frost_pictures() -> list[np.ndarray]:
    """The photographs in 0..1, every fifth pixel of them: they come with the package imagecorruptions-imaug."""
    from PIL import Image

    package = importlib.util.find_spec(
        "imagecorruptions"
    )  # found, not imported: it would load two large libraries
    if package is None or package.origin is None:
        raise InputError(
            "frost needs photographs, which come with an extra: pip install 'fedhb[corruptions]'"
        )
    folder = Path(package.origin).parent / "frost"
    return [
        np.asarray(Image.open(folder / name).convert("RGB"))[2::5, 2::5] / 255.0
        for name in FROST_PICTURES
    ]


def snow(
    x: np.ndarray, rngs: Rngs, mean: float = 0.3, deviation: float = 0.3, zoom: float = 1.25
) -> np.ndarray:
    """Flakes (noise above 0.65, magnified, falling at -135 to -45 degrees) from both sides, on a paler image."""
    threshold, radius, sigma, kept = 0.65, 14, 12.0, 0.8
    flakes = _magnify(
        mean + deviation * _draw(rngs, lambda rng: rng.standard_normal((SIZE, SIZE, 1))), zoom
    )
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0, flakes), 0, 1) * 255) / 255
    flakes = (
        np.round(_trail(flakes, [rng.uniform(-135, -45) for rng in rngs], radius, sigma) * 255)
        / 255
    )
    pale = np.maximum(x, 1.5 * (x @ GREY)[..., None] + 0.5)
    return kept * x + (1 - kept) * pale + flakes + flakes[:, ::-1, ::-1]


def spatter(
    x: np.ndarray, rngs: Rngs, mean: float = 0.65, deviation: float = 0.1, threshold: float = 0.68
) -> np.ndarray:
    """Mud where smoothed noise is above the threshold, and that, smoothed again, above 0.8."""
    liquid = _smooth(
        mean + deviation * _draw(rngs, lambda rng: rng.standard_normal((SIZE, SIZE, 1))), 0.5
    )
    mud = _smooth((liquid > threshold).astype(float), 0.6)
    mud[mud < 0.8] = 0
    return x * (1 - mud) + MUD * mud


# ---- colour and compression


def brightness(x: np.ndarray, rngs: Rngs, added: float = 0.3) -> np.ndarray:
    """V + added in HSV: all colours of a pixel grow by one factor, and black becomes grey."""
    value = x.max(axis=-1, keepdims=True)
    more = np.clip(value + added, 0, 1)
    return np.where(value > 0, x * more / np.where(value > 0, value, 1), more)


def contrast(x: np.ndarray, rngs: Rngs, factor: float = 0.15) -> np.ndarray:
    """mean + factor (x - mean), with the mean of each colour over the image."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (x - mean)


def saturate(x: np.ndarray, rngs: Rngs, factor: float = 2.5, added: float = 0.2) -> np.ndarray:
    """S <- factor S + added in HSV: the distances to the largest colour grow by one factor; grey, whose hue is 0, turns red."""
    value = x.max(axis=-1, keepdims=True)
    below = value - x
    saturation = below.max(axis=-1, keepdims=True) / np.where(value > 0, value, 1)
    more = np.clip(factor * saturation + added, 0, 1)
    red = value * np.array([0.0, 1.0, 1.0])
    return value - more * np.where(
        saturation > 0, below / np.where(saturation > 0, saturation, 1), red
    )


def jpeg_compression(x: np.ndarray, rngs: Rngs, quality: int = 40) -> np.ndarray:
    """Through a JPEG file."""
    from PIL import Image

    found = []
    for picture in _bytes(x):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        found.append(np.asarray(Image.open(file)))
    return np.stack(found) / 255.0


def pixelate(x: np.ndarray, rngs: Rngs, factor: float = 0.65) -> np.ndarray:
    """Means over boxes: down to 20 x 20 pixels, and up again."""
    from PIL import Image

    small, box = int(SIZE * factor), Image.Resampling.BOX
    found = [
        Image.fromarray(one).resize((small, small), box).resize((SIZE, SIZE), box)
        for one in _bytes(x)
    ]
    return np.stack([np.asarray(one) for one in found]) / 255.0


def elastic_transform(
    x: np.ndarray,
    rngs: Rngs,
    strength: float = 0.1 * SIZE,
    sigma: float = 0.03 * SIZE,
    jolt: float = 0.03 * SIZE,
) -> np.ndarray:
    """An affine map that moves three points by up to `jolt` pixels; then every pixel moves by smoothed noise of `strength`."""
    centre, reach = SIZE // 2, SIZE // 3
    before = centre + reach * np.array(
        [[1, 1], [1, -1], [-1, -1]]
    )  # (column, row) of three corners of a square
    after = before + _draw(rngs, lambda rng: rng.uniform(-jolt, jolt, size=(3, 2)))
    here = np.concatenate([after, np.ones((len(x), 3, 1))], axis=2)
    back = np.linalg.solve(
        here, np.broadcast_to(before.astype(float), (len(x), 3, 2))
    )  # [n, 3, 2]: from here to there
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(float)
    there = np.stack([columns, rows, np.ones_like(rows)], axis=-1) @ back[:, None]  # [n, 32, 32, 2]
    bent = _at(x, there[..., 1], there[..., 0], repeat=False)
    noise = _draw(rngs, lambda rng: rng.uniform(-1, 1, size=(2, SIZE, SIZE))).reshape(
        -1, SIZE, SIZE, 1
    )
    moves = strength * _smooth(noise, sigma, truncate=3, mode="reflect").reshape(-1, 2, SIZE, SIZE)
    return _at(bent, rows + moves[:, 1], columns + moves[:, 0], repeat=True)


CORRUPTIONS: dict[str, Callable[[np.ndarray, Rngs], np.ndarray]] = {
    one.__name__: one
    for one in (
        gaussian_noise, shot_noise, impulse_noise, speckle_noise, gaussian_blur, glass_blur, defocus_blur, motion_blur, zoom_blur,
        fog, frost, snow, spatter, brightness, contrast, saturate, jpeg_compression, pixelate, elastic_transform,
    )
}  # fmt: skip
"""By the names of the published files."""


# ---- what they share


def _draw(rngs: Rngs, draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    """What each generator gives, stacked [n, ...]."""
    return np.stack([draw(rng) for rng in rngs])


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.round(x * 255).astype(np.uint8)


def _smooth(
    x: np.ndarray, sigma: float, truncate: float = 4.0, mode: str = "nearest"
) -> np.ndarray:
    from scipy import ndimage

    return ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode=mode, truncate=truncate)


def _magnify(x: np.ndarray, factor: float) -> np.ndarray:
    """The middle of the images, as large as the whole, by linear interpolation from its first pixel to its last."""
    size = int(np.ceil(SIZE / factor))
    large = round(size * factor)
    place = (np.arange(SIZE) + (large - SIZE) // 2) * (size - 1) / (large - 1)
    weights = np.maximum(1 - np.abs(place[:, None] - np.arange(size)), 0)  # [32, size]
    top = (SIZE - size) // 2
    middle = np.moveaxis(x[:, top : top + size, top : top + size], -1, 1)
    return np.moveaxis(weights @ middle @ weights.T, 1, -1)


def _trail(x: np.ndarray, degrees: Sequence[float], radius: int, sigma: float) -> np.ndarray:
    """Each pixel becomes the mean of those at 0, 1, ..., 2 radius pixels from it in one direction, by half a Gaussian."""
    distance = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (distance / sigma) ** 2)
    weights /= weights.sum()
    angle = np.deg2rad(degrees)
    who, place = np.arange(len(x))[:, None, None], np.arange(SIZE)
    found = np.zeros_like(x)
    for i, weight in zip(distance, weights, strict=True):
        rows = np.clip(place + np.ceil(i * np.sin(angle) - 0.5).astype(int)[:, None], 0, SIZE - 1)
        columns = np.clip(
            place + np.ceil(i * np.cos(angle) - 0.5).astype(int)[:, None], 0, SIZE - 1
        )
        found += weight * x[who, rows[:, :, None], columns[:, None, :]]
    return found


def _at(x: np.ndarray, rows: np.ndarray, columns: np.ndarray, repeat: bool) -> np.ndarray:
    """The images at real places [n, 32, 32], linearly interpolated; mirrored outside, where the last row may be repeated."""
    period = 2 * (SIZE if repeat else SIZE - 1)

    def inside(index: np.ndarray) -> np.ndarray:
        index = index % period
        return np.minimum(index, period - repeat - index)

    who = np.arange(len(x))[:, None, None]
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    found = np.zeros_like(x)
    for row, share in ((top, 1 - down), (top + 1, down)):
        for column, part in ((left, 1 - right), (left + 1, right)):
            found += share * part * x[who, inside(row), inside(column)]
    return found
