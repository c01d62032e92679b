"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn: a data set that needs no files."""

from __future__ import annotations

import hashlib

import numpy as np

from fedhb.data.arrays import held_out
from fedhb.data.dataset import Dataset, Examples

NUM_CLASSES = 10
_SPLIT_SEED = 8  # part of the data set's definition: results depend on it


def load() -> Dataset:
    """The digits, a fifth of each class as test examples, the same ones always.

    Returns:
        x uint8 [n, 1, 8, 8] with values 0..16, y int64 [n].
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    digest = hashlib.sha256(x.tobytes() + y.astype("<i8").tobytes()).hexdigest()
    test = held_out(y, 0.2, _SPLIT_SEED)
    return Dataset(
        "digits", Examples(x[~test], y[~test]), Examples(x[test], y[test]), NUM_CLASSES, {"scikit-learn digits": digest}
    )
