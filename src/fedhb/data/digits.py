"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn, without a download."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from pathlib import Path

import numpy as np

from fedhb.data.dataset import Dataset, Examples
from fedhb.data.table import held_out

NUM_CLASSES = 10
_SPLIT_SEED = 8  # part of the data set's definition: results depend on it


def load() -> Dataset:
    """Load the digits; a fifth of each class are test examples, always the same ones.

    Returns:
        x uint8 [n, 1, 8, 8] with values 0..16, y int64 [n].
    """
    table = _read()
    x = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    y = table[:, -1].astype(np.int64)
    digest = hashlib.sha256(x.tobytes() + y.astype("<i8").tobytes()).hexdigest()
    test = held_out(y, 0.2, _SPLIT_SEED)
    return Dataset(
        "digits",
        Examples(x[~test], y[~test]),
        Examples(x[test], y[test]),
        NUM_CLASSES,
        {"scikit-learn digits": digest},
    )


def _read() -> np.ndarray:
    """Return the pixels and the label of each digit [1797, 65].

    Reading the table from scikit-learn's folder takes a hundredth of the time of importing
    scikit-learn.
    """
    package = importlib.util.find_spec("sklearn")
    folders = None if package is None else package.submodule_search_locations
    for folder in folders or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            with gzip.open(path) as file:
                return np.loadtxt(file, delimiter=",", dtype=np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()  # finds the table in versions that store it elsewhere
    return np.column_stack([bunch.data, bunch.target]).astype(np.int64)
