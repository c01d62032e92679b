"""The clients of a federation: a pool of examples, and which client holds which rows of it.

The examples of all clients lie in one pool, as stored (uint8 images stay uint8); a client is a list
of row numbers. A cohort is a selection of clients over the same pool, so that no example is copied
before a batch is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from fedhb.clients.checks import check_labels, suspect_targets
from fedhb.clients.scaling import Scaling
from fedhb.data.array_checks import check_digits, check_finite
from fedhb.data.dataset import Dataset
from fedhb.errors import InputError

MAX_ID = 10**18
"""Ids of clients are smaller than this: they are numbers of 64 bits, and names of files."""

SPLITS = ("train", "validation", "test")
"""The parts into which a client's examples are split."""

AUGMENTED = ("cifar-100", "cifar-100-coarse", "cifar-100-c")
"""Data sets whose training images are cropped and flipped at random."""


@dataclass(frozen=True)
class Share:
    """The examples of one split that N clients hold.

    Attributes:
        x: the pool of inputs [n, ...], as stored.
        y: the pool of targets [n] or [n, q].
        rows: row numbers in the pool, client after client [held].
        offsets: where each client's rows begin [N + 1]; client k holds
            `rows[offsets[k]:offsets[k + 1]]`.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, rows_of_client: Sequence[np.ndarray]) -> Share:
        """Make a share from one array of row numbers per client."""
        sizes = torch.tensor([len(rows) for rows in rows_of_client], dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        rows = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_of_client])
        return cls(x, y, torch.from_numpy(rows), offsets)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of examples of each client [N]."""  # cached, as it costs O(N) for one client
        return self.offsets.diff()

    def rows_of(self, k: int) -> Tensor:
        """Return the row numbers of the client at position k."""
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

    def examples(self, k: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the client at position k.

        A client with more than `limit` examples gives so many of them, evenly spaced, because rows
        are often ordered by class.
        """
        rows = self.rows_of(k)
        if limit is not None and limit < len(rows):
            rows = rows[torch.arange(limit) * len(rows) // limit]
        return self.x[rows], self.y[rows]

    def select(self, positions: Sequence[int]) -> Share:
        """Return the share of the clients at these positions, over the same pool."""
        chosen = torch.tensor(list(positions), dtype=torch.int64)
        sizes = self.sizes[chosen]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        # How far each client's rows move: from their place here to their place among all clients'.
        shift = self.offsets[chosen] - offsets[:-1]
        places = torch.arange(int(offsets[-1])) + shift.repeat_interleave(sizes)
        return Share(self.x, self.y, self.rows[places], offsets)


@dataclass(frozen=True, repr=False)
class Clients:
    """The clients of a federation, or a selection of them.

    Attributes:
        ids: the id of each client [N]; it stays with the client in every selection.
        train, validation, test: the examples of each client. Validation and test may be None, and
            some clients may have none of these examples.
        names: the name of each client in the data, or None if the data have no names.
        num_classes: the number of classes, or None for regression.
        scaling: how inputs are scaled before they go into the network.
        augment: "crop-flip" for the random crop (padding 4) and flip of CIFAR images, or None.
        server_inputs: unlabelled inputs that the server holds [n, ...], or None.
        name: the data set's name.
        title: the data set's name in results, if it is another than `name`; else "".
        files: the hash of every file that was read.
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
                f"client {empty[0]} has no training examples ({len(empty)} of {len(self)} clients "
                "are empty): use fewer clients, a larger alpha, or leave such clients out"
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
        """Make clients from one (x, y) pair each.

        Args:
            train: one (inputs, targets) pair per client. Integer targets are class labels, real
                targets are regressed on.
            test: one pair per client, in the same order, or None; a client without test examples
                has ([], []).
            num_classes: the number of classes (default: the largest label plus one).
            standardise: scale the inputs by the mean and standard deviation of all training inputs.
            ids: the clients' ids (default 0, 1, ...). A client's memory belongs to its id, so new
                clients need new ids.
            names: the clients' names in results (default: their ids).
        """
        if not len(train):
            raise InputError("no clients: `train` is empty; give one (x, y) pair per client")
        if test is not None and len(test) != len(train):
            raise InputError(
                f"{len(train)} clients have training data but {len(test)} have test data: give one "
                "pair for each"
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
                    f"test inputs have shape {x_test.shape[1:]}, training inputs {x.shape[1:]}: "
                    "make them alike"
                )
            test_share = Share.of(torch.from_numpy(x_test), targets(y_test), rows)
        classes = check_labels(y, y_test, num_classes)
        if num_classes is None:
            suspect_targets(y)
        if ids is not None and (len(ids) != len(train) or len(set(ids)) != len(train)):
            raise InputError(
                f"{len(ids)} ids ({len(set(ids))} different) for {len(train)} clients: give each "
                "client another id"
            )
        for i in ids if ids is not None else ():
            if not isinstance(i, int | np.integer) or not 0 <= i < MAX_ID:
                raise InputError(
                    f"id {i!r}: give whole numbers from 0 to below {MAX_ID}; names go to `names`"
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
        """Make clients of a data set from the rows of its training and test examples they hold.

        Inputs are scaled by the mean and standard deviation of the training set.
        """
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
        """Make clients whose training and test examples all lie in `dataset.train`.

        Inputs are scaled by the mean and standard deviation of the rows `scaled_by`.
        """
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

    def __repr__(self) -> str:  # without the examples, which are private
        sizes, shape = self.sizes, " x ".join(map(str, self.train.x.shape[1:]))
        counts = f"{sizes.min()} to {sizes.max()}" if len(self) else "no"
        targets = f"{self.num_classes} classes" if self.num_classes is not None else "real targets"
        return (
            f"<{self.name}: {len(self)} clients with {counts} training examples, inputs "
            f"{shape or 'of one number'}, {targets}>"
        )

    @property
    def sizes(self) -> Tensor:
        """The number of training examples of each client [N]: |D_i|."""
        return self.train.sizes

    @property
    def num_examples(self) -> int:
        """The number of training examples of all clients: |D|."""
        return len(self.train.rows)

    def has(self, split: str) -> bool:
        """Return whether any client has examples of "train", "validation" or "test"."""
        share: Share | None = getattr(self, split)
        return share is not None and len(share.rows) > 0

    def select(self, positions: Sequence[int]) -> Clients:
        """Return the clients at these positions, over the same pool."""
        return replace(
            self,
            ids=self.ids[list(positions)],
            names=None if self.names is None else tuple(self.names[k] for k in positions),
            train=self.train.select(positions),
            test=None if self.test is None else self.test.select(positions),
            validation=None if self.validation is None else self.validation.select(positions),
        )

    def to(self, device: str) -> Clients:
        """Return these clients with their pools on a device."""

        def moved(share: Share) -> Share:
            return replace(share, x=share.x.to(device), y=share.y.to(device))

        test = None if self.test is None else moved(self.test)
        validation = None if self.validation is None else moved(self.validation)
        return replace(self, train=moved(self.train), test=test, validation=validation)

    def hold_out(self, count: int, seed: int) -> tuple[Clients, Clients]:
        """Choose novel clients at random, which never train.

        Returns:
            (the clients that train, `count` novel clients).
        """
        if not 0 < count < len(self):
            raise InputError(
                f"holdout_clients={count} of {len(self)} clients: hold out at least one and leave "
                "at least one"
            )
        order = np.random.default_rng([seed, 0x401D]).permutation(len(self))
        novel, training = sorted(order[:count].tolist()), sorted(order[count:].tolist())
        return self.select(training), self.select(novel)

    def with_at_most(self, count: int, seed: int) -> Clients:
        """Return these clients with at most `count` training examples each, drawn at random.

        The examples drawn for one count are among those drawn for a larger count.
        """
        if count < 1:
            raise InputError(
                f"max_examples={count}: leave every client at least one training example"
            )
        train_rows = []
        for k, client in enumerate(self.ids.tolist()):
            rows = self.train.rows_of(k).numpy()
            order = np.random.default_rng([seed, 0x3A5, client]).permutation(len(rows))
            train_rows.append(np.sort(rows[order[:count]]))
        return replace(self, train=Share.of(self.train.x, self.train.y, train_rows))

    def with_validation(self, fraction: float, seed: int) -> Clients:
        """Move a share of every client's training examples to its validation split.

        At least one example is moved from a client that has two, and never all.
        """
        if not 0 < fraction < 1:
            raise InputError(f"validation={fraction}: give a share between 0 and 1, such as 0.1")
        train_rows, validation_rows = [], []
        for k, client in enumerate(self.ids.tolist()):
            rows = self.train.rows_of(k).numpy()
            count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
            order = np.random.default_rng([seed, 0x7A1, client]).permutation(len(rows))
            validation_rows.append(np.sort(rows[order[:count]]))
            train_rows.append(np.sort(rows[order[count:]]))
        x, y = self.train.x, self.train.y
        return replace(
            self,
            train=Share.of(x, y, train_rows),
            validation=Share.of(x, y, validation_rows),
        )


class _About(TypedDict):
    """The fields of `Clients` that describe a data set."""

    augment: str | None
    name: str
    title: str
    files: Mapping[str, str]


def _about(dataset: Dataset) -> _About:
    augment = "crop-flip" if dataset.name in AUGMENTED and dataset.train.x.ndim == 4 else None
    return {
        "augment": augment,
        "name": dataset.name,
        "title": dataset.title,
        "files": dataset.files,
    }


def targets(y: np.ndarray) -> Tensor:
    """Convert targets to a tensor: labels to int64, real targets to float32."""
    return torch.from_numpy(y.astype(np.int64) if y.dtype.kind in "iub" else y.astype(np.float32))


def _pool(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], split: str
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Check the pairs of a split, "training" or "test", and find each client's rows in their pool.

    Returns:
        (inputs, targets) of every client that has examples, and the row numbers of every client.
    """
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    rows, start = [], 0
    for k, pair in enumerate(pairs):
        if isinstance(pairs, Mapping) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InputError(
                f"client {k}'s {split} data are not an (x, y) pair: give a list with one pair per "
                "client"
            )
        x, y = map(np.asarray, pair)
        if y.dtype.kind not in "iubf":
            raise InputError(
                f"client {k} has targets of type {y.dtype}: give integer class labels 0, 1, ... or "
                "real targets"
            )
        if len(x) != len(y):
            raise InputError(
                f"client {k} has {len(x)} {split} inputs but {len(y)} targets: give one target per "
                "input"
            )
        if not len(x) and split == "test":
            rows.append(np.arange(0))
            continue
        if not len(x):
            raise InputError(f"client {k} has no {split} examples: leave it out")
        if y.dtype.kind in "iub" and y.ndim > 1:
            if y.shape[1:] != (1,):
                raise InputError(
                    f"client {k} has {split} labels of shape {y.shape}: give the number of the "
                    "class, one for each input"
                )
            y = y[:, 0]
        if xs and x.shape[1:] != xs[0].shape[1:]:
            raise InputError(
                f"client {k} has inputs of shape {x.shape[1:]}, others of {xs[0].shape[1:]}: make "
                "them alike"
            )
        if ys and (y.dtype.kind == "f") != (ys[0].dtype.kind == "f"):
            raise InputError(
                f"client {k} has targets of type {y.dtype}, others of {ys[0].dtype}: give labels "
                "or real targets in all"
            )
        check_finite(x, f"{split} inputs of client {k}")
        xs.append(x)
        ys.append(y)
        rows.append(np.arange(start, start + len(x)))
        start += len(x)
    return xs, ys, rows


def _joined(xs: list[np.ndarray], ys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate(xs)
    check_digits(x, "inputs")
    return (x if x.dtype == np.uint8 else x.astype(np.float32)), np.concatenate(ys)
