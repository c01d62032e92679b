"""The nineteen corruptions of CIFAR-10-C and CIFAR-100-C at severity 5, for RGB images of 32 x 32.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019. The constants are those of their CIFAR data sets, in pixels of 32 x 32,
not those of ImageNet. The randomness of an image depends on the corruption's name and the image's
number alone, so batches and processes do not change the result.

A corruption maps images x [n, 32, 32, 3] in 0..1, and a generator for each, to images in 0..1.
Pixels are rounded down to whole numbers, as in the published files.
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
"""The weights of red, green and blue in the brightness of a pixel."""
MUD = np.array([63, 42, 20]) / 255
FROST_PICTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The photographs that the published data were made with, five of the six that exist."""


def corrupt(name: str, images: np.ndarray, first: int = 0) -> np.ndarray:
    """Corrupt images.

    Args:
        name: one of `CORRUPTIONS`.
        images: uint8 [n, 32, 32, 3], or one [32, 32, 3].
        first: the number of the first image; the next image has the next number. The numbers decide
            the randomness.

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
            f"images of type {images.dtype} and shape {images.shape}: give uint8 [n, {SIZE}, "
            f"{SIZE}, 3], colours last, because the constants are for this size"
        )
    batch = images if images.ndim == 4 else images[None]
    rngs = [
        np.random.default_rng([zlib.crc32(name.encode()), first + k]) for k in range(len(batch))
    ]
    corrupted = CORRUPTIONS[name](batch / 255.0, rngs)
    # 1e-6: rounding errors can leave a whole number slightly too small
    return (np.clip(corrupted, 0, 1) * 255 + 1e-6).astype(np.uint8).reshape(images.shape)


# ---- noise


def gaussian_noise(x: np.ndarray, rngs: Rngs, deviation: float = 0.10) -> np.ndarray:
    """x + deviation z."""
    return x + deviation * _draw(rngs, lambda rng: rng.standard_normal(x.shape[1:]))


def shot_noise(x: np.ndarray, rngs: Rngs, rate: float = 50.0) -> np.ndarray:
    """Poisson(rate x) / rate: mean x, variance x / rate."""
    counts = [rng.poisson(image * rate) for image, rng in zip(x, rngs, strict=True)]
    return np.stack(counts) / rate


def impulse_noise(x: np.ndarray, rngs: Rngs, share: float = 0.07) -> np.ndarray:
    """Set this share of all values to 0 or 1, half of it to each."""
    drawn = _draw(rngs, lambda rng: rng.random(x.shape[1:]))
    return np.where(drawn < share, np.where(drawn < share / 2, 0.0, 1.0), x)


def speckle_noise(x: np.ndarray, rngs: Rngs, deviation: float = 0.2) -> np.ndarray:
    """x (1 + deviation z)."""
    return x * (1 + deviation * _draw(rngs, lambda rng: rng.standard_normal(x.shape[1:])))


# ---- blur


def gaussian_blur(x: np.ndarray, rngs: Rngs, sigma: float = 1.0) -> np.ndarray:
    """Smooth with a Gaussian kernel of deviation sigma, cut at 4 sigma."""
    return _smooth(x, sigma)


def glass_blur(
    x: np.ndarray, rngs: Rngs, sigma: float = 0.4, shift: int = 1, passes: int = 2
) -> np.ndarray:
    """Smooth, give every pixel the colour of a pixel near it, and smooth again.

    The other pixel lies up to `shift` above or below and to the left or right. Pixels change in
    order from the last to the first, so colours move far. The published code means to swap two
    pixels, but overwrites one before it reads it.
    """
    picture = (np.clip(_smooth(x, sigma), 0, 1) * 255 + 1e-6).astype(np.uint8)
    places = range(SIZE - shift, shift, -1)
    steps = _draw(
        rngs, lambda rng: rng.integers(-shift, shift, size=(passes, len(places), len(places), 2))
    )
    image = np.arange(len(x))
    for turn in range(passes):
        for i, row in enumerate(places):
            for j, column in enumerate(places):
                up, left = steps[:, turn, i, j].T
                picture[:, row, column] = picture[image, row + up, column + left]
    return _smooth(picture / 255.0, sigma)


def defocus_blur(x: np.ndarray, rngs: Rngs, radius: float = 1.5, alias: float = 0.1) -> np.ndarray:
    """Average over a disk; a Gaussian of deviation `alias` over 3 x 3 pixels smooths its edge."""
    from scipy import ndimage

    return ndimage.correlate(x, disk(radius, alias)[None, :, :, None], mode="mirror")


def disk(radius: float, alias: float) -> np.ndarray:
    """Return the kernel of `defocus_blur`, which sums to one."""
    from scipy import ndimage

    axis = np.arange(-8, 9)
    flat = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(float)
    edge = np.exp(-0.5 * np.square([-1.0, 0.0, 1.0]) / alias**2)
    edge /= edge.sum()
    smooth = ndimage.correlate1d(ndimage.correlate1d(flat / flat.sum(), edge, axis=0), edge, axis=1)
    used = np.abs(axis) <= int(radius) + 1
    return smooth[np.ix_(used, used)]


def motion_blur(x: np.ndarray, rngs: Rngs, radius: int = 9, sigma: float = 2.5) -> np.ndarray:
    """Draw every pixel out to one side, at an angle between -45 and 45 degrees to the rows.

    Values are rounded to multiples of 1/255, as in the published code's library.
    """
    return np.round(_trail(x, [rng.uniform(-45, 45) for rng in rngs], radius, sigma) * 255) / 255


def zoom_blur(x: np.ndarray, rngs: Rngs, below: float = 1.26, step: float = 0.01) -> np.ndarray:
    """Average the image and its magnifications by 1, 1.01, ..., 1.25."""
    # The last factor is slightly above 1.25, which decides how the size is rounded.
    factors = np.arange(1, below, step)
    return (x + sum(_magnify(x, factor) for factor in factors)) / (len(factors) + 1)


# ---- weather


def fog(x: np.ndarray, rngs: Rngs, strength: float = 1.5, decay: float = 1.75) -> np.ndarray:
    """(x + strength plasma) m / (m + strength), with m the image's largest value."""
    m = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + strength * plasma(rngs, decay)[..., None]) * m / (m + strength)


def plasma(rngs: Rngs, decay: float) -> np.ndarray:
    """Return clouds [n, 32, 32] in 0..1, by the diamond-square algorithm on a torus.

    The noise of the first, coarsest grid is uniform in +- 100^2; every halving of the grid divides
    its amplitude by decay^2.
    """
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
    """kept x + added frost, where frost is a piece of one of the five photographs."""
    pictures = frost_pictures()
    pieces = []
    for rng in rngs:
        picture = pictures[rng.integers(len(pictures))]
        row, column = (rng.integers(size - SIZE) for size in picture.shape[:2])
        pieces.append(picture[row : row + SIZE, column : column + SIZE])
    return kept * x + added * np.stack(pieces)


@lru_cache(maxsize=1)
def frost_pictures() -> list[np.ndarray]:
    """Return the photographs of frost in 0..1, every fifth pixel of every fifth row.

    They come with the package imagecorruptions-imaug.
    """
    from PIL import Image

    # The package is not imported, because that would load two large libraries.
    package = importlib.util.find_spec("imagecorruptions")
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
    """Make the image paler and add flakes, and the same flakes turned by 180 degrees.

    Flakes are magnified noise above 0.65, drawn out at -135 to -45 degrees to the rows.
    """
    threshold, radius, sigma, kept = 0.65, 14, 12.0, 0.8
    noise = _draw(rngs, lambda rng: rng.standard_normal((SIZE, SIZE, 1)))
    flakes = _magnify(mean + deviation * noise, zoom)
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0, flakes), 0, 1) * 255) / 255
    flakes = _trail(flakes, [rng.uniform(-135, -45) for rng in rngs], radius, sigma)
    flakes = np.round(flakes * 255) / 255
    pale = np.maximum(x, 1.5 * (x @ GREY)[..., None] + 0.5)
    return kept * x + (1 - kept) * pale + flakes + flakes[:, ::-1, ::-1]


def spatter(
    x: np.ndarray, rngs: Rngs, mean: float = 0.65, deviation: float = 0.1, threshold: float = 0.68
) -> np.ndarray:
    """Add mud where smoothed noise is above the threshold.

    The map of these pixels is smoothed too, and values of it below 0.8 count as 0.
    """
    noise = _draw(rngs, lambda rng: rng.standard_normal((SIZE, SIZE, 1)))
    liquid = _smooth(mean + deviation * noise, 0.5)
    mud = _smooth((liquid > threshold).astype(float), 0.6)
    mud[mud < 0.8] = 0
    return x * (1 - mud) + MUD * mud


# ---- colour and compression


def brightness(x: np.ndarray, rngs: Rngs, added: float = 0.3) -> np.ndarray:
    """V <- V + added in HSV: the colours of a pixel grow by one factor, and black becomes grey."""
    value = x.max(axis=-1, keepdims=True)
    brighter = np.clip(value + added, 0, 1)
    return np.where(value > 0, x * brighter / np.where(value > 0, value, 1), brighter)


def contrast(x: np.ndarray, rngs: Rngs, factor: float = 0.15) -> np.ndarray:
    """mean + factor (x - mean), with the mean of each colour over the image."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (x - mean)


def saturate(x: np.ndarray, rngs: Rngs, factor: float = 2.5, added: float = 0.2) -> np.ndarray:
    """S <- factor S + added in HSV: the distances to the largest colour grow by one factor.

    Grey, whose hue counts as 0, turns red.
    """
    value = x.max(axis=-1, keepdims=True)
    below = value - x
    saturation = below.max(axis=-1, keepdims=True) / np.where(value > 0, value, 1)
    stronger = np.clip(factor * saturation + added, 0, 1)
    red = value * np.array([0.0, 1.0, 1.0])
    return value - stronger * np.where(
        saturation > 0, below / np.where(saturation > 0, saturation, 1), red
    )


def jpeg_compression(x: np.ndarray, rngs: Rngs, quality: int = 40) -> np.ndarray:
    """Write each image to a JPEG file of this quality, and read it again."""
    from PIL import Image

    decoded = []
    for picture in _bytes(x):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(file)))
    return np.stack(decoded) / 255.0


def pixelate(x: np.ndarray, rngs: Rngs, factor: float = 0.65) -> np.ndarray:
    """Shrink to 20 x 20 pixels and enlarge again, by means over boxes."""
    from PIL import Image

    small, box = int(SIZE * factor), Image.Resampling.BOX
    pictures = [
        Image.fromarray(picture).resize((small, small), box).resize((SIZE, SIZE), box)
        for picture in _bytes(x)
    ]
    return np.stack([np.asarray(picture) for picture in pictures]) / 255.0


def elastic_transform(
    x: np.ndarray,
    rngs: Rngs,
    strength: float = 0.1 * SIZE,
    sigma: float = 0.03 * SIZE,
    jolt: float = 0.03 * SIZE,
) -> np.ndarray:
    """Apply a random affine map, then move every pixel by smoothed noise.

    The affine map moves three points by up to `jolt` pixels; the noise is multiplied by `strength`.
    """
    centre, reach = SIZE // 2, SIZE // 3
    # The (column, row) of three corners of a square.
    before = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + _draw(rngs, lambda rng: rng.uniform(-jolt, jolt, size=(3, 2)))
    corners = np.concatenate([after, np.ones((len(x), 3, 1))], axis=2)
    # The affine map [n, 3, 2] from places in the result back to places in the image.
    inverse = np.linalg.solve(corners, np.broadcast_to(before.astype(float), (len(x), 3, 2)))
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(float)
    places = np.stack([columns, rows, np.ones_like(rows)], axis=-1) @ inverse[:, None]
    moved = _at(x, places[..., 1], places[..., 0], repeat=False)
    noise = _draw(rngs, lambda rng: rng.uniform(-1, 1, size=(2, SIZE, SIZE)))
    smooth = _smooth(noise.reshape(-1, SIZE, SIZE, 1), sigma, truncate=3, mode="reflect")
    shifts = strength * smooth.reshape(-1, 2, SIZE, SIZE)
    return _at(moved, rows + shifts[:, 1], columns + shifts[:, 0], repeat=True)


CORRUPTIONS: dict[str, Callable[[np.ndarray, Rngs], np.ndarray]] = {
    corruption.__name__: corruption
    for corruption in (
        gaussian_noise, shot_noise, impulse_noise, speckle_noise,
        gaussian_blur, glass_blur, defocus_blur, motion_blur, zoom_blur,
        fog, frost, snow, spatter,
        brightness, contrast, saturate, jpeg_compression, pixelate, elastic_transform,
    )
}  # fmt: skip
"""The corruptions, by the names of the published files."""


# ---- shared by several corruptions


def _draw(rngs: Rngs, draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    """Call `draw` with each generator, and stack the results [n, ...]."""
    return np.stack([draw(rng) for rng in rngs])


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.round(x * 255).astype(np.uint8)


def _smooth(
    x: np.ndarray, sigma: float, truncate: float = 4.0, mode: str = "nearest"
) -> np.ndarray:
    from scipy import ndimage

    return ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode=mode, truncate=truncate)


def _magnify(x: np.ndarray, factor: float) -> np.ndarray:
    """Enlarge the middle of the images to 32 x 32 pixels, by linear interpolation."""
    size = int(np.ceil(SIZE / factor))
    large = round(size * factor)
    place = (np.arange(SIZE) + (large - SIZE) // 2) * (size - 1) / (large - 1)
    weights = np.maximum(1 - np.abs(place[:, None] - np.arange(size)), 0)  # [32, size]
    top = (SIZE - size) // 2
    middle = np.moveaxis(x[:, top : top + size, top : top + size], -1, 1)
    return np.moveaxis(weights @ middle @ weights.T, 1, -1)


def _trail(x: np.ndarray, degrees: Sequence[float], radius: int, sigma: float) -> np.ndarray:
    """Average each pixel with those at distances 1, ..., 2 radius from it in one direction.

    The weights fall with the distance as a Gaussian of deviation `sigma`; `degrees` has the angle
    between the direction and the rows, for each image.
    """
    distance = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (distance / sigma) ** 2)
    weights /= weights.sum()
    angle = np.deg2rad(degrees)
    image, place = np.arange(len(x))[:, None, None], np.arange(SIZE)
    mean = np.zeros_like(x)
    for i, weight in zip(distance, weights, strict=True):
        down = np.ceil(i * np.sin(angle) - 0.5).astype(int)[:, None]
        right = np.ceil(i * np.cos(angle) - 0.5).astype(int)[:, None]
        rows, columns = (np.clip(place + shift, 0, SIZE - 1) for shift in (down, right))
        mean += weight * x[image, rows[:, :, None], columns[:, None, :]]
    return mean


def _at(x: np.ndarray, rows: np.ndarray, columns: np.ndarray, repeat: bool) -> np.ndarray:
    """Return the images' values at real places [n, 32, 32], by linear interpolation.

    Outside, the image is mirrored; `repeat` says whether the last row and column occur twice there.
    """
    period = 2 * (SIZE if repeat else SIZE - 1)

    def inside(index: np.ndarray) -> np.ndarray:
        index = index % period
        return np.minimum(index, period - repeat - index)

    image = np.arange(len(x))[:, None, None]
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    values = np.zeros_like(x)
    for row, row_weight in ((top, 1 - down), (top + 1, down)):
        for column, column_weight in ((left, 1 - right), (left + 1, right)):
            values += row_weight * column_weight * x[image, inside(row), inside(column)]
    return values
