"""One client, many clients: a pool of examples and who holds which rows of it.

The examples of all clients lie in one pool, as stored (uint8 images stay uint8); a client is a list of row numbers. A cohort
is a selection of clients over the same pool, so that nothing is copied until a batch is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhb.clients.checks import check_labels, suspect_targets
from fedhb.clients.scaling import Scaling
from fedhb.data.array_checks import check_digits, check_finite
from fedhb.data.dataset import Dataset
from fedhb.errors import InputError

MOST_ID = 10**18
"""Ids of clients are smaller: they are numbers of 64 bits, and names of files."""

SPLITS = ("train", "validation", "test")
"""What a client may hold."""

AUGMENTED = ("cifar-100", "cifar-100-coarse", "cifar-100-c")
"""Data sets whose training images are cropped and flipped at random."""


@dataclass(frozen=True)
class Share:
    """What N clients hold of one split.

    Attributes:
        x: the pool of inputs [n, ...], as stored.
        y: the pool of targets [n] or [n, q].
        rows: row numbers into the pool, client after client [held].
        offsets: where each client's rows begin [N + 1]; client k holds `rows[offsets[k]:offsets[k + 1]]`.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, rows_of_client: Sequence[np.ndarray]) -> Share:
        """A share from one array of row numbers per client."""
        sizes = torch.tensor([len(rows) for rows in rows_of_client], dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        rows = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_of_client])
        return cls(x, y, torch.from_numpy(rows), offsets)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of examples of each client [N]; kept, because whoever asks for one client's would pay for all N."""
        return self.offsets.diff()

    def rows_of(self, k: int) -> Tensor:
        """The row numbers of the client at position k."""
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

    def examples(self, k: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the client at position k; at most so many, evenly spaced: rows are often ordered by class."""
        rows = self.rows_of(k)
        if most is not None and most < len(rows):
            rows = rows[torch.arange(most) * len(rows) // most]
        return self.x[rows], self.y[rows]

    def select(self, positions: Sequence[int]) -> Share:
        """The same pool, held by the clients at these positions only."""
        chosen = torch.tensor(list(positions), dtype=torch.int64)
        sizes = self.sizes[chosen]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        shift = (
            self.offsets[chosen] - offsets[:-1]
        )  # from where a client's rows begin here to where they begin in all
        return Share(
            self.x,
            self.y,
            self.rows[torch.arange(int(offsets[-1])) + shift.repeat_interleave(sizes)],
            offsets,
        )


@dataclass(frozen=True, repr=False)
class Clients:
    """The clients of a federation, or a selection of them.

    Attributes:
        ids: the partition id of each client [N]; it stays with the client in every selection.
        train, validation, test: what each client holds; validation and test may be None, or of some clients only.
        names: what the data call each client, or None where they do not.
        num_classes: the number of classes, or None for regression.
        scaling: how inputs are scaled before the network sees them.
        augment: "crop-flip" for the random crop (padding 4) and flip of CIFAR images, or None.
        server_inputs: unlabelled inputs that the server holds [n, ...], or None.
        name: the data set's name.
        title: as results call it, where that is not its name.
        files: hash of every file that was read.
    """

    ids: Tensor
    train: Share
    test: Share | None = None
    validation: Share | None = None
    names: tuple[str, ...] | None = None
    num_classes: int | None = None
    scaling: Scaling = field(default_factory=Scaling)
    augment: str | None = None
    server_inputs: Tensor | None = None
    name: str = "arrays"
    title: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.train.sizes == 0).any():
            empty = self.ids[self.train.sizes == 0].tolist()
            raise InputError(
                f"client {empty[0]} has no training examples ({len(empty)} of {len(self)} clients are empty): use fewer "
                "clients, a larger alpha, or leave such clients out"
            )

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[np.ndarray, np.ndarray]],
        test: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
        *,
        num_classes: int | None = None,
        standardise: bool = False,
        ids: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Clients:
        """Clients from one (x, y) pair each.

        Args:
            train: one (inputs, targets) pair per client. Integer targets are class labels, real targets are regressed on.
            test: the same, in the same order, or None; a client may have none of its own, ([], []).
            num_classes: default: the largest label plus one.
            standardise: scale the inputs by the mean and standard deviation of all training inputs.
            ids: the clients' ids (default 0, 1, ...). What a client remembers belongs to its id: new clients need others.
            names: what results call the clients (default: by their ids).
        """
        if not len(train):
            raise InputError("no clients: `train` is empty; give one (x, y) pair per client")
        if test is not None and len(test) != len(train):
            raise InputError(
                f"{len(train)} clients have training data but {len(test)} have test data: give one pair for each"
            )
        xs, ys, rows = _pool(train, "training")
        x, y = _joined(xs, ys)
        share = Share.of(torch.from_numpy(x), targets(y), rows)
        test_share, y_test = None, None
        xs, ys, rows = _pool(() if test is None else test, "test")
        if xs:
            x_test, y_test = _joined(xs, ys)
            if x_test.shape[1:] != x.shape[1:]:
                raise InputError(
                    f"test inputs have shape {x_test.shape[1:]}, training inputs {x.shape[1:]}: make them alike"
                )
            test_share = Share.of(torch.from_numpy(x_test), targets(y_test), rows)
        classes = check_labels(y, y_test, num_classes)
        if num_classes is None:
            suspect_targets(y)
        if ids is not None and (len(ids) != len(train) or len(set(ids)) != len(train)):
            raise InputError(
                f"{len(ids)} ids ({len(set(ids))} different) for {len(train)} clients: give each client an id of its own"
            )
        for i in ids if ids is not None else ():
            if not isinstance(i, int | np.integer) or not 0 <= i < MOST_ID:
                raise InputError(
                    f"id {i!r}: give whole numbers from 0 to below {MOST_ID}; names go to `names`"
                )
        if names is not None and len(names) != len(train):
            raise InputError(f"{len(names)} names for {len(train)} clients: give each one")
        return cls(
            ids=torch.arange(len(train)) if ids is None else torch.as_tensor(list(ids)),
            train=share,
            test=test_share,
            names=None if names is None else tuple(map(str, names)),
            num_classes=classes,
            scaling=Scaling.fit(x) if standardise else Scaling(),
        )

    @classmethod
    def from_rows(
        cls, dataset: Dataset, train_rows: Sequence[np.ndarray], test_rows: Sequence[np.ndarray]
    ) -> Clients:
        """Clients of a data set, given who holds which training and test examples. Inputs are scaled by the training set."""
        if len(dataset.test) and dataset.test.x.shape[1:] != dataset.train.x.shape[1:]:
            shapes = f"{dataset.test.x.shape[1:]}, training inputs {dataset.train.x.shape[1:]}"
            raise InputError(f"{dataset.name}: test inputs have shape {shapes}: make them alike")
        check_finite(dataset.train.x, "training inputs")
        check_finite(dataset.test.x, "test inputs")
        classes = check_labels(dataset.train.y, dataset.test.y, dataset.num_classes)
        train = Share.of(torch.from_numpy(dataset.train.x), targets(dataset.train.y), train_rows)
        test = (
            Share.of(torch.from_numpy(dataset.test.x), targets(dataset.test.y), test_rows)
            if len(dataset.test)
            else None
        )
        return cls(
            ids=torch.arange(len(train_rows)),
            train=train,
            test=test,
            num_classes=classes,
            scaling=Scaling.fit(dataset.train.x),
            **_about(dataset),
        )

    @classmethod
    def from_pool(
        cls,
        dataset: Dataset,
        train_rows: Sequence[np.ndarray],
        test_rows: Sequence[np.ndarray],
        scaled_by: np.ndarray,
        names: Sequence[str],
    ) -> Clients:
        """Clients whose training and test examples all lie in `dataset.train`; inputs are scaled by these rows of it."""
        x, y = dataset.train.x, dataset.train.y
        check_finite(x, "inputs")
        pool = torch.from_numpy(x), targets(y)
        return cls(
            ids=torch.arange(len(train_rows)),
            train=Share.of(*pool, train_rows),
            test=Share.of(*pool, test_rows),
            names=tuple(names),
            num_classes=check_labels(y, None, dataset.num_classes),
            scaling=Scaling.fit(x[np.sort(scaled_by)]),
            **_about(dataset),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:  # without the examples, which are nobody's to print
        sizes, shape = self.sizes, " x ".join(map(str, self.train.x.shape[1:]))
        each = f"{sizes.min()} to {sizes.max()}" if len(self) else "no"
        what = f"{self.num_classes} classes" if self.num_classes is not None else "real targets"
        return f"<{self.name}: {len(self)} clients with {each} training examples, inputs {shape or 'of one number'}, {what}>"

    @property
    def sizes(self) -> Tensor:
        """The number of training examples of each client [N]: |D_i|."""
        return self.train.sizes

    @property
    def num_examples(self) -> int:
        """The number of training examples of all clients: |D|."""
        return len(self.train.rows)

    def has(self, split: str) -> bool:
        """Whether any client has examples of "train", "validation" or "test"."""
        share: Share | None = getattr(self, split)
        return share is not None and len(share.rows) > 0

    def select(self, positions: Sequence[int]) -> Clients:
        """The clients at these positions, over the same pool."""
        return replace(
            self,
            ids=self.ids[list(positions)],
            names=None if self.names is None else tuple(self.names[k] for k in positions),
            train=self.train.select(positions),
            test=None if self.test is None else self.test.select(positions),
            validation=None if self.validation is None else self.validation.select(positions),
        )

    def to(self, device: str) -> Clients:
        """The same clients with their pools on a device."""

        def moved(share: Share) -> Share:
            return replace(share, x=share.x.to(device), y=share.y.to(device))

        test = None if self.test is None else moved(self.test)
        validation = None if self.validation is None else moved(self.validation)
        return replace(self, train=moved(self.train), test=test, validation=validation)

    def hold_out(self, count: int, seed: int) -> tuple[Clients, Clients]:
        """(clients that train, `count` novel clients that never do), chosen at random."""
        if not 0 < count < len(self):
            raise InputError(
                f"holdout_clients={count} of {len(self)} clients: hold out at least one and leave at least one"
            )
        order = np.random.default_rng([seed, 0x401D]).permutation(len(self))
        novel, kept = sorted(order[:count].tolist()), sorted(order[count:].tolist())
        return self.select(kept), self.select(novel)

    def with_at_most(self, count: int, seed: int) -> Clients:
        """Every client with `count` of its training examples, drawn at random, or all where it has no more; a larger count keeps
        those of a smaller one."""
        if count < 1:
            raise InputError(
                f"max_examples={count}: leave every client at least one training example"
            )
        kept = []
        for k, client in enumerate(self.ids.tolist()):
            rows = self.train.rows_of(k).numpy()
            kept.append(
                np.sort(
                    rows[
                        np.random.default_rng([seed, 0x3A5, client]).permutation(len(rows))[:count]
                    ]
                )
            )
        return replace(self, train=Share.of(self.train.x, self.train.y, kept))

    def with_validation(self, fraction: float, seed: int) -> Clients:
        """Move a share of every client's training examples to its validation split (at least one where it has two)."""
        if not 0 < fraction < 1:
            raise InputError(f"validation={fraction}: give a share between 0 and 1, such as 0.1")
        kept, held = [], []
        for k, client in enumerate(self.ids.tolist()):
            rows = self.train.rows_of(k).numpy()
            count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
            order = np.random.default_rng([seed, 0x7A1, client]).permutation(len(rows))
            held.append(np.sort(rows[order[:count]]))
            kept.append(np.sort(rows[order[count:]]))
        x, y = self.train.x, self.train.y
        return replace(self, train=Share.of(x, y, kept), validation=Share.of(x, y, held))


def _about(dataset: Dataset) -> dict[str, Any]:
    augment = "crop-flip" if dataset.name in AUGMENTED and dataset.train.x.ndim == 4 else None
    return {
        "augment": augment,
        "name": dataset.name,
        "title": dataset.title,
        "files": dataset.files,
    }


def targets(y: np.ndarray) -> Tensor:
    """Targets as a tensor: labels as int64, real targets as float32."""
    return torch.from_numpy(y.astype(np.int64) if y.dtype.kind in "iub" else y.astype(np.float32))


def _pool(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], what: str
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """The inputs and targets of every client that has any, and each client's rows once they are joined."""
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    rows, start = [], 0
    for k, pair in enumerate(pairs):
        if isinstance(pairs, Mapping) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InputError(
                f"client {k}'s {what} data are not an (x, y) pair: give a list with one pair per client"
            )
        x, y = map(np.asarray, pair)
        if y.dtype.kind not in "iubf":
            raise InputError(
                f"client {k} has targets of type {y.dtype}: give integer class labels 0, 1, ... or real targets"
            )
        if len(x) != len(y):
            raise InputError(
                f"client {k} has {len(x)} {what} inputs but {len(y)} targets: give one target per input"
            )
        if not len(x) and what == "test":
            rows.append(np.arange(0))
            continue
        if not len(x):
            raise InputError(f"client {k} has no {what} examples: leave it out")
        if y.dtype.kind in "iub" and y.ndim > 1:
            if y.shape[1:] != (1,):
                raise InputError(
                    f"client {k} has {what} labels of shape {y.shape}: give the number of the class, one for each input"
                )
            y = y[:, 0]
        if xs and x.shape[1:] != xs[0].shape[1:]:
            raise InputError(
                f"client {k} has inputs of shape {x.shape[1:]}, others of {xs[0].shape[1:]}: make them alike"
            )
        if (y.dtype.kind == "f") != (ys[0].dtype.kind == "f" if ys else y.dtype.kind == "f"):
            raise InputError(
                f"client {k} has targets of type {y.dtype}, others of {ys[0].dtype}: give labels or real targets in all"
            )
        check_finite(x, f"{what} inputs of client {k}")
        xs.append(x)
        ys.append(y)
        rows.append(np.arange(start, start + len(x)))
        start += len(x)
    return xs, ys, rows


def _joined(xs: list[np.ndarray], ys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate(xs)
    check_digits(x, "inputs")
    return (x if x.dtype == np.uint8 else x.astype(np.float32)), np.concatenate(ys)
