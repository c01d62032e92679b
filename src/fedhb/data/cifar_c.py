"""CIFAR-100-C: the CIFAR-100 test images under nineteen corruptions, read from files or made.

    NAME.npy      uint8 [N, 32, 32, 3], one file per corruption
    labels.npy    whole numbers [N]
    SHA256SUMS    only where the files were made here: the hash of each

The published files have five severities one after another, N = 50,000, of which the last 10,000 are
used. The files that `make` writes have severity 5 alone, N = 10,000. All images are in
`Dataset.train`: a partition by groups gives each group of clients one corruption, and splits its
images into training and test images.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedhb.data import cifar, locate
from fedhb.data.corruptions import SIZE, corrupt, frost_pictures
from fedhb.data.dataset import Dataset, Examples
from fedhb.errors import InputError
from fedhb.processes import end_with

NAME = "cifar-100-c"
SEVERITIES = 5
IMAGES_PER_TASK = 500
"""How many images one process corrupts at once."""

TRAINING = (
    "brightness", "defocus_blur", "elastic_transform", "fog", "frost",
    "gaussian_noise", "jpeg_compression", "pixelate", "shot_noise", "zoom_blur",
)  # fmt: skip
"""The corruptions of clients that train. We drew them once: the paper does not name its ten."""
NOVEL = (
    "contrast", "gaussian_blur", "glass_blur", "impulse_noise", "motion_blur",
    "saturate", "snow", "spatter", "speckle_noise",
)  # fmt: skip
"""The corruptions of clients that never train."""

Tell = Callable[[str, int, int], None]
"""Reports progress: (corruption, how many of its images were just done, images in all)."""


def load(root: str | os.PathLike[str] | None = None) -> Dataset:
    """Read CIFAR-100-C at severity 5.

    Args:
        root: the folder to look in (default: the search path of `fedhb.data.locate`).

    Returns:
        In `train`, x uint8 [19 n, 3, 32, 32], y int64 [19 n], group and original; `test` is empty.
    """
    paths = {path.stem: path for path in locate.find(NAME, root)}
    made = (paths["labels"].parent / locate.SUMS).exists()
    labels = _labels(paths["labels"], made)
    digest = hashlib.sha256(labels.tobytes())
    names = (*TRAINING, *NOVEL)
    x = np.empty((len(names), len(labels), 3, SIZE, SIZE), dtype=np.uint8)
    for place, name in zip(x, names, strict=True):
        images = _array(paths[name])
        if (
            images.shape != (len(labels) * (1 if made else SEVERITIES), SIZE, SIZE, 3)
            or images.dtype != np.uint8
        ):
            raise InputError(
                f"{paths[name]}: {images.dtype} of shape {images.shape} for {len(labels)} labels: "
                f"it has to be uint8 [n, {SIZE}, {SIZE}, 3], five severities one after another as "
                "published, or as `fedhb data make` writes it"
            )
        used = np.ascontiguousarray(images[-len(labels) :])
        digest.update(used.data)
        place[...] = used.transpose(0, 3, 1, 2)
    count = len(names)
    original = np.tile(np.arange(len(labels)), count)
    train = Examples(
        x.reshape(-1, 3, SIZE, SIZE),
        np.tile(labels, count),
        group=np.arange(count).repeat(len(labels)),
        original=original,
    )
    title = "CIFAR-100-C (regenerated)" if made else "CIFAR-100-C"
    empty = Examples(train.x[:0], train.y[:0])
    hashes = {f"{NAME}, severity 5": digest.hexdigest()}
    return Dataset(NAME, train, empty, cifar.NUM_FINE, hashes, title, names, len(NOVEL))


def _labels(path: Path, made: bool) -> np.ndarray:
    """Read the labels of one severity, int64 [n]."""
    labels = _array(path)
    if (
        labels.ndim != 1
        or labels.dtype.kind not in "iu"
        or not len(labels)
        or not 0 <= labels.min() <= labels.max() < cifar.NUM_FINE
    ):
        raise InputError(
            f"{path}: {labels.dtype} of shape {labels.shape}: it has to be labels in "
            f"0..{cifar.NUM_FINE - 1}"
        )
    labels = labels.astype(np.int64)
    if made:
        return labels
    if len(labels) % SEVERITIES == 0:
        by_severity = labels.reshape(SEVERITIES, -1)
    else:
        by_severity = labels[None, :0]
    if not by_severity.size or (by_severity != by_severity[0]).any():
        raise InputError(
            f"{path}: {len(labels)} labels are not those of five severities one after another: "
            "take the published file"
        )
    return by_severity[0]


def _array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{path}: not a .npy file of numbers ({error}): delete it and get or make it again"
        ) from None
    return np.asarray(array)


def make(processes: int, tell: Tell) -> Path:
    """Make CIFAR-100-C at severity 5 from the CIFAR-100 test images.

    Files that are already there are kept, and a new file gets its name only when it is whole. The
    result does not depend on the number of processes, nor on interruptions.

    Args:
        processes: how many processes work at once.
        tell: reports progress.

    Returns:
        The folder of the files: below the first root that can be written to.
    """
    located = locate.locate(NAME)
    if located.folder is not None and not (located.folder / locate.SUMS).exists():
        raise InputError(
            f"{located.folder} has the published CIFAR-100-C: there is nothing to make"
        )
    folder = located.folder or locate.place_for(NAME)
    test = cifar.read(locate.find("cifar-100")[1], coarse=False)[0]
    images = np.ascontiguousarray(test.x.transpose(0, 2, 3, 1))
    labels = folder / "labels.npy"
    if not (folder / locate.SUMS).exists() and any(folder.glob("*.npy")):
        raise InputError(
            f"{folder} has .npy files that were not made here: complete the published data set, or "
            "remove them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if labels.exists() and not np.array_equal(_array(labels), test.y):
        raise InputError(
            f"{folder} was made from other CIFAR-100 test images (its labels differ): remove it, "
            "and make it anew"
        )
    names, todo = (*TRAINING, *NOVEL), []
    for name in names:
        path = folder / f"{name}.npy"
        if path.exists() and _array(path).shape == images.shape:
            tell(name, len(images), len(names) * len(images))
        else:
            todo.append(name)
    if "frost" in todo:
        frost_pictures()  # now: a user who lacks them should not wait for the message
    _write_sums(folder)
    if not labels.exists():
        _write(labels, test.y)
    _write_sums(folder)
    starts = range(0, len(images), IMAGES_PER_TASK)
    with _workers(processes) as run:
        for name in todo:
            parts = []
            for part in run([(name, images[k : k + IMAGES_PER_TASK], k) for k in starts]):
                parts.append(part)
                tell(name, len(part), len(names) * len(images))
            _write(folder / f"{name}.npy", np.concatenate(parts))
            _write_sums(folder, {f"{name}.npy"})
    return folder


Task = tuple[str, np.ndarray, int]
"""The arguments of `corrupt`."""


def _run_task(task: Task) -> np.ndarray:
    return corrupt(*task)


@contextmanager
def _workers(processes: int) -> Iterator[Callable[[list[Task]], Iterator[np.ndarray]]]:
    """Yield a function that runs tasks in so many processes and returns the results in order."""
    if processes == 1:
        yield lambda tasks: map(_run_task, tasks)
        return
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=end_with,
        initargs=(os.getpid(),),
    )
    try:
        yield lambda tasks: pool.map(_run_task, tasks)
    finally:
        pool.shutdown(cancel_futures=True)


def _write(path: Path, array: np.ndarray) -> None:
    part = path.with_suffix(f".part{os.getpid()}")
    with part.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _write_sums(folder: Path, rewritten: Collection[str] = ()) -> None:
    """Write the hash of every file to SHA256SUMS, for `sha256sum -c SHA256SUMS`.

    Only the files that have no hash there yet and those in `rewritten` are read.
    """
    path = folder / locate.SUMS
    lines = path.read_text().splitlines() if path.exists() else []
    hashes = dict(line.split("  ")[::-1] for line in lines)
    for file in sorted(folder.glob("*.npy")):
        if file.name not in hashes or file.name in rewritten:
            with file.open("rb") as content:
                hashes[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items())))
    part.replace(path)
