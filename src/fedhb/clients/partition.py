"""Who holds which examples: shards, Dirichlet, identically distributed, by groups, or as the data say.

The `*_rows` functions are pure: labels and a seed in, one array of row numbers per client out, for training and test
examples alike. A client's test examples follow the same class proportions as its training examples. Every example is
held by exactly one client. Where there are no test examples at all, the test part is N empty arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedhb.clients.clients import Clients
from fedhb.data.dataset import Dataset
from fedhb.errors import InputError
from fedhb.settings_fields import GROUP_SPLITS

Rows = list[np.ndarray]
"""Row numbers, ascending, one array per client."""

MAX_ATTEMPTS = 100
"""How often a random partition that leaves a client without examples is drawn again."""

# Each kind of partition has randomness of its own, so that equal seeds do not couple them.
_SHARDS, _DIRICHLET, _IID, _GROUPS = 0x5A4D, 0xD112, 0x11D0, 0x6409

TEST_SHARE = 0.1
"""The share of each class that is held back for testing where a partition by groups splits the examples."""


def shards(dataset: Dataset, num_clients: int, shards_per_client: int, seed: int = 0) -> Clients:
    """Cut every class into shards and deal each client `shards_per_client` of them, as FedBABU does.

    Args:
        dataset: labelled data.
        num_clients: N.
        shards_per_client: s; a client holds at most s classes (fewer where it is dealt one class twice).
        seed: equal seeds give equal partitions.
    """
    labels, test_labels = _labels(dataset, "shards")
    return Clients.from_rows(
        dataset, *shard_rows(labels, test_labels, num_clients, shards_per_client, seed)
    )


def dirichlet(dataset: Dataset, num_clients: int, alpha: float, seed: int = 0) -> Clients:
    """Spread every class over the clients in proportions drawn from a symmetric Dirichlet distribution.

    Args:
        dataset: labelled data.
        num_clients: N.
        alpha: the concentration: near 0 each class lies with few clients, large values spread it evenly.
        seed: equal seeds give equal partitions.
    """
    labels, test_labels = _labels(dataset, "dirichlet")
    return Clients.from_rows(
        dataset, *dirichlet_rows(labels, test_labels, num_clients, alpha, seed)
    )


def iid(dataset: Dataset, num_clients: int, seed: int = 0) -> Clients:
    """Deal the examples at random, equally many to every client (give or take one).

    Args:
        dataset: labelled data or regression data.
        num_clients: N.
        seed: equal seeds give equal partitions.
    """
    return Clients.from_rows(
        dataset, *iid_rows(len(dataset.train), len(dataset.test), num_clients, seed)
    )


def natural(dataset: Dataset) -> Clients:
    """Give every example to the client that the data name; clients are numbered 0..N-1 in the order of their names."""
    train, test = dataset.train.client, dataset.test.client
    if train is None or (test is None and len(dataset.test)):
        raise InputError(
            f"data set {dataset.name} does not say who holds its examples: add an array `client`, or use the partition "
            "shards, dirichlet or iid"
        )
    clients = Clients.from_rows(dataset, *natural_rows(train, train[:0] if test is None else test))
    return replace(clients, names=tuple(map(str, np.unique(train).tolist())))


def groups(
    dataset: Dataset,
    num_clients: int,
    novel_clients: int,
    shards_per_client: int,
    seed: int = 0,
    split: str = "image",
) -> tuple[Clients, Clients | None]:
    """Give every client examples of one kind, such as one corruption; within a kind, deal shards of classes.

    Args:
        dataset: labelled data of several kinds (`Dataset.groups`); the last `num_novel` of them are held by novel clients alone.
        num_clients: N, equally many of each training kind.
        novel_clients: clients that never train, equally many of each other kind; 0 for none.
        shards_per_client: s.
        seed: equal seeds give equal partitions.
        split: "image" or "group", see `group_rows`.

    Returns:
        The clients that train, and the novel ones.
    """
    labels, _ = _labels(dataset, "groups")
    train = dataset.train
    if train.group is None or train.original is None:
        raise InputError(
            f"data set {dataset.name} has no groups: use the partition shards, dirichlet or iid"
        )
    numbers, known = range(len(dataset.groups)), len(dataset.groups) - dataset.num_novel
    of_group = _shared("num_clients", num_clients, numbers[:known])
    if novel_clients:
        of_group |= _shared("holdout_clients", novel_clients, numbers[known:])
    rows, test_rows = group_rows(
        labels, train.group, train.original, of_group, shards_per_client, seed, split
    )
    names = [f"{dataset.groups[g]} {k}" for g, count in of_group.items() for k in range(count)]
    everyone = Clients.from_pool(
        dataset, rows, test_rows, np.concatenate(rows[:num_clients]), names
    )
    novel = range(num_clients, len(everyone))
    return everyone.select(range(num_clients)), everyone.select(novel) if novel else None


def _shared(name: str, count: int, numbers: range) -> dict[int, int]:
    """So many clients for each of these groups."""
    if count % len(numbers):
        raise InputError(
            f"{name}={count}, but there are {len(numbers)} groups: give a multiple of {len(numbers)}"
        )
    return {g: count // len(numbers) for g in numbers}


def shard_rows(
    labels: np.ndarray,
    test_labels: np.ndarray,
    num_clients: int,
    shards_per_client: int,
    seed: int = 0,
) -> tuple[Rows, Rows]:
    """Rows of each client under the shard partition.

    A shuffled list of classes, one entry per shard, is laid out as a matrix [N, s]; row k says which classes client k
    is dealt, in training and test alike. The classes get shards in proportion to their training examples (equally many
    where the classes are equally large and it divides), at least one each.

    Args:
        labels: classes of the training examples [n].
        test_labels: classes of the test examples [m].
        num_clients: N.
        shards_per_client: s.
        seed: equal seeds give equal partitions.
    """
    _check_counts(num_clients, len(labels), len(test_labels), seed)
    _check_integer("shards_per_client", shards_per_client)
    total = num_clients * shards_per_client
    split = _Classes(labels, test_labels)
    asked = (
        f"num_clients={num_clients} with shards_per_client={shards_per_client} makes {total} shards"
    )
    if total < len(split.train_sizes):
        raise InputError(
            f"{asked}, fewer than the {len(split.train_sizes)} classes: use more clients or more shards per client"
        )
    if total > len(labels):
        raise InputError(
            f"{asked}, more than the {len(labels)} training examples: use fewer clients or fewer shards per client"
        )
    if (split.train_sizes == 0).any():
        name = split.names[split.train_sizes.argmin()]
        raise InputError(
            f"class {name} has test examples but no training examples: remove them, or add training examples"
        )
    shards_of_class = allot(split.train_sizes, total)

    for attempt in range(MAX_ATTEMPTS):
        rng = np.random.default_rng([_SHARDS, seed, attempt])
        class_of_slot = rng.permutation(
            np.repeat(np.arange(len(shards_of_class)), shards_of_class)
        )  # [N * s], row by row
        holders = []
        for part, sizes in ((split.train, split.train_sizes), (split.test, split.test_sizes)):
            # The slots of a class get its shards in random order: sorted by class, they line up with the shards.
            slot_of_shard = np.lexsort((rng.random(total), class_of_slot))
            holders.append(
                slot_of_shard[_shard_of_example(part, sizes, shards_of_class)] // shards_per_client
            )
        if _all_served(holders[1], num_clients):
            return _gather(holders[0], num_clients), _gather(holders[1], num_clients)
    raise InputError(
        f"{asked}: with {len(test_labels)} test examples some client always ends up without any "
        f"({MAX_ATTEMPTS} attempts): use fewer clients, or more shards per client"
    )


def dirichlet_rows(
    labels: np.ndarray, test_labels: np.ndarray, num_clients: int, alpha: float, seed: int = 0
) -> tuple[Rows, Rows]:
    """Rows of each client under the Dirichlet partition: the same proportions cut the training and the test examples.

    Args:
        labels: classes of the training examples [n].
        test_labels: classes of the test examples [m].
        num_clients: N.
        alpha: the concentration, above 0.
        seed: equal seeds give equal partitions.
    """
    _check_counts(num_clients, len(labels), len(test_labels), seed)
    if not alpha > 0:
        raise InputError(
            f"alpha={alpha}: give a value above 0, such as 0.5 (smaller: clients differ more)"
        )
    split = _Classes(labels, test_labels)
    num_classes = len(split.names)
    for attempt in range(MAX_ATTEMPTS):
        rng = np.random.default_rng([_DIRICHLET, seed, attempt])
        if alpha < 1e12:
            proportions = rng.dirichlet(np.full(num_clients, float(alpha)), size=num_classes)
        else:  # the limit, where the sampler would overflow
            proportions = np.full((num_classes, num_clients), 1 / num_clients)
        # Each class goes round the clients in an order of its own, or the rounding would always favour the same ones.
        turns = rng.permuted(np.tile(np.arange(num_clients), (num_classes, 1)), axis=1)
        holders = [
            _cut(part, sizes, proportions, turns, rng)
            for part, sizes in ((split.train, split.train_sizes), (split.test, split.test_sizes))
        ]
        if all(_all_served(holder, num_clients) for holder in holders):
            return _gather(holders[0], num_clients), _gather(holders[1], num_clients)
    raise InputError(
        f"alpha={alpha} with num_clients={num_clients}: some client always ends up without training or test examples "
        f"({MAX_ATTEMPTS} attempts): use a larger alpha or fewer clients"
    )


def iid_rows(num_train: int, num_test: int, num_clients: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Rows of each client when n training and m test examples are dealt at random."""
    _check_counts(num_clients, num_train, num_test, seed)
    rng = np.random.default_rng([_IID, seed])
    train, test = (
        np.array_split(rng.permutation(count), num_clients) for count in (num_train, num_test)
    )
    return [np.sort(rows) for rows in train], [np.sort(rows) for rows in test]


def natural_rows(client: np.ndarray, test_client: np.ndarray) -> tuple[Rows, Rows]:
    """Rows of each client where every training example [n] and test example [m] names its client; some have no test examples."""
    names, holder = np.unique(client, return_inverse=True)
    strangers = np.setdiff1d(test_client, names)
    if len(strangers):
        listed = ", ".join(map(str, strangers[:5].tolist())) + (
            f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        )
        raise InputError(
            f"clients with test examples but no training examples: {listed}. Leave them out, or give each a training example"
        )
    return _gather(holder, len(names)), _gather(np.searchsorted(names, test_client), len(names))


def group_rows(
    labels: np.ndarray,
    group: np.ndarray,
    original: np.ndarray,
    clients_of_group: Mapping[int, int],
    shards_per_client: int,
    seed: int = 0,
    split: str = "image",
) -> tuple[Rows, Rows]:
    """Rows of each client, group after group, where a tenth of every class is held back for testing.

    Args:
        labels: classes of the examples [n].
        group: the group of each [n].
        original: what each was made from [n]; copies of one image in several groups have the same number.
        clients_of_group: how many clients hold the examples of each group.
        shards_per_client: s.
        seed: equal seeds give equal partitions.
        split: "image" holds back the same originals in every group, so that no test image was trained on as another group's
            copy of it; "group" draws each group's own, as the paper does, and leaks.
    """
    if split not in GROUP_SPLITS:
        raise InputError(f"group_split={split!r}: choose from {', '.join(GROUP_SPLITS)}")
    held_back = np.zeros(len(labels), dtype=bool)
    if split == "image":
        _, first, number = np.unique(original, return_index=True, return_inverse=True)
        held_back = _some_of_each_class(labels[first], np.random.default_rng([_GROUPS, seed]))[
            number
        ]
    train_rows, test_rows = [], []
    for g, count in clients_of_group.items():
        mine = np.flatnonzero(group == g)
        if split == "group":
            held_back[mine] = _some_of_each_class(
                labels[mine], np.random.default_rng([_GROUPS, seed, g])
            )
        train, test = mine[~held_back[mine]], mine[held_back[mine]]
        own = int(np.random.SeedSequence([_GROUPS, seed, g]).generate_state(1)[0])
        held, tested = shard_rows(labels[train], labels[test], count, shards_per_client, own)
        train_rows += [train[rows] for rows in held]
        test_rows += [test[rows] for rows in tested]
    return train_rows, test_rows


def _some_of_each_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whether each example [n] is among those held back: TEST_SHARE of its class, drawn at random."""
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    place = _place_in_class(classes, sizes, np.lexsort((rng.random(len(labels)), classes)))
    return place < np.floor(TEST_SHARE * sizes + 0.5)[classes]


def allot(sizes: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` seats in proportion to sizes by largest remainders, at least one each.

    Args:
        sizes: positive integers [C].
        total: at least C.

    Returns:
        Seats [C], summing to `total`.
    """
    sizes = sizes.astype(np.int64)
    quota = total * sizes  # in units of 1 / sizes.sum(): exact
    whole = int(sizes.sum())
    seats = np.maximum(quota // whole, 1)
    while seats.sum() < total:
        seats[np.argmax(quota - seats * whole)] += 1
    while (
        seats.sum() > total
    ):  # seats given to tiny classes are taken from those furthest above their quota
        surplus = np.where(seats > 1, seats * whole - quota, np.iinfo(np.int64).min)
        seats[np.argmax(surplus)] -= 1
    return seats


class _Classes:
    """Training and test labels renumbered 0..C-1 over the classes that occur.

    Attributes:
        names: the classes as they were [C].
        train, test: the class of each example [n], [m].
        train_sizes, test_sizes: examples of each class [C].
    """

    def __init__(self, labels: np.ndarray, test_labels: np.ndarray) -> None:
        self.names, both = np.unique(np.concatenate([labels, test_labels]), return_inverse=True)
        self.train, self.test = both[: len(labels)], both[len(labels) :]
        self.train_sizes = np.bincount(self.train, minlength=len(self.names))
        self.test_sizes = np.bincount(self.test, minlength=len(self.names))


def _place_in_class(classes: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """How many examples of its class come before each example, when `order` lists them class by class [n]."""
    place = np.empty(len(classes), dtype=np.int64)
    place[order] = np.arange(len(classes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def _shard_of_example(
    classes: np.ndarray, sizes: np.ndarray, shards_of_class: np.ndarray
) -> np.ndarray:
    """The shard of each example [n]; shards are numbered class by class.

    A class is cut in the order of the data into equal shards; what is left over goes one each to its first shards.
    """
    place = _place_in_class(classes, sizes, np.argsort(classes, kind="stable"))
    width = (sizes // shards_of_class)[classes]
    even = width * shards_of_class[classes]
    shard = np.where(place < even, place // np.maximum(width, 1), place - even)
    return shard + (np.cumsum(shards_of_class) - shards_of_class)[classes]


def _cut(
    classes: np.ndarray,
    sizes: np.ndarray,
    proportions: np.ndarray,
    turns: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """The client of each example [n]: a class is shuffled and cut in `proportions` for the clients `turns` [C, N]."""
    order = np.lexsort((rng.random(len(classes)), classes))
    cuts = np.floor(np.cumsum(proportions, axis=1) * sizes[:, None] + 0.5).astype(np.int64)
    cuts[:, -1] = sizes  # whatever the rounding of the sum, no example is lost
    cuts = np.minimum(cuts, sizes[:, None]) + (np.cumsum(sizes) - sizes)[:, None]
    # Class after class the cuts ascend, so one search over all of them finds every example's class and client at once.
    found = np.searchsorted(cuts.ravel(), np.arange(len(classes)), side="right")
    holder = np.empty(len(classes), dtype=np.int64)
    holder[order] = turns.ravel()[found]
    return holder


def _gather(holder: np.ndarray, num_clients: int) -> Rows:
    """The rows of each client, from the client of each row."""
    order = np.argsort(holder, kind="stable")
    return np.split(order, np.cumsum(np.bincount(holder, minlength=num_clients))[:-1])


def _all_served(holder: np.ndarray, num_clients: int) -> bool:
    return len(holder) == 0 or bool((np.bincount(holder, minlength=num_clients) > 0).all())


def _labels(dataset: Dataset, partition: str) -> tuple[np.ndarray, np.ndarray]:
    if dataset.num_classes is None or dataset.train.y.dtype.kind not in "iub":
        raise InputError(
            f"partition {partition} needs class labels, but data set {dataset.name} has real targets: use the "
            "partition iid, or natural where the data name the clients"
        )
    return dataset.train.y, dataset.test.y


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name}={value}: give a whole number of at least 1")


def _check_counts(num_clients: int, num_train: int, num_test: int, seed: int) -> None:
    _check_integer("num_clients", num_clients)
    for count, what in ((num_train, "training"), (num_test, "test")):
        if num_clients > count and (count > 0 or what == "training"):
            raise InputError(
                f"num_clients={num_clients}, but there are only {count} {what} examples: use at most {count} clients"
            )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed={seed}: give a whole number of at least 0")
