"""Which client holds which examples: by shards, Dirichlet, at random, by groups, or by the data.

The `*_rows` functions are pure: from labels and a seed they make one array of row numbers per
client, for training and for test examples. A client's test examples have the same class proportions
as its training examples. Every example is held by exactly one client. If there are no test
examples, the test part is N empty arrays.
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

# The kinds of partitions have different random streams, so that equal seeds do not couple them.
_SHARDS, _DIRICHLET, _IID, _GROUPS = 0x5A4D, 0xD112, 0x11D0, 0x6409

TEST_SHARE = 0.1
"""The share of each class that a partition by groups holds back for testing."""


def shards(dataset: Dataset, num_clients: int, shards_per_client: int, seed: int = 0) -> Clients:
    """Cut every class into shards, and deal each client `shards_per_client` of them, as in FedBABU.

    Args:
        dataset: labelled data.
        num_clients: N.
        shards_per_client: s; a client holds at most s classes (fewer if it gets one class twice).
        seed: equal seeds give equal partitions.
    """
    labels, test_labels = _labels(dataset, "shards")
    return Clients.from_rows(
        dataset, *shard_rows(labels, test_labels, num_clients, shards_per_client, seed)
    )


def dirichlet(dataset: Dataset, num_clients: int, alpha: float, seed: int = 0) -> Clients:
    """Spread every class over the clients in proportions from a symmetric Dirichlet distribution.

    Args:
        dataset: labelled data.
        num_clients: N.
        alpha: the concentration: near 0 few clients hold each class; large values spread it evenly.
        seed: equal seeds give equal partitions.
    """
    labels, test_labels = _labels(dataset, "dirichlet")
    return Clients.from_rows(
        dataset, *dirichlet_rows(labels, test_labels, num_clients, alpha, seed)
    )


def iid(dataset: Dataset, num_clients: int, seed: int = 0) -> Clients:
    """Deal the examples at random; clients differ in size by at most one example.

    Args:
        dataset: labelled data or regression data.
        num_clients: N.
        seed: equal seeds give equal partitions.
    """
    return Clients.from_rows(
        dataset, *iid_rows(len(dataset.train), len(dataset.test), num_clients, seed)
    )


def natural(dataset: Dataset) -> Clients:
    """Give every example to the client that the data name.

    Clients are numbered 0..N-1 in the order of their names.
    """
    train, test = dataset.train.client, dataset.test.client
    if train is None or (test is None and len(dataset.test)):
        raise InputError(
            f"data set {dataset.name} does not say who holds its examples: add an array `client`, "
            "or use the partition shards, dirichlet or iid"
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
    """Give every client examples of one group, such as one corruption, in shards of classes.

    Args:
        dataset: labelled data of several groups (`Dataset.groups`); only novel clients hold
            examples of the last `num_novel` groups.
        num_clients: N, equally many for each of the other groups.
        novel_clients: how many clients never train, equally many for each of the last groups; 0
            for none.
        shards_per_client: s.
        seed: equal seeds give equal partitions.
        split: "image" or "group", see `group_rows`.

    Returns:
        (the clients that train, the novel clients or None).
    """
    labels, _ = _labels(dataset, "groups")
    train = dataset.train
    if train.group is None or train.original is None:
        raise InputError(
            f"data set {dataset.name} has no groups: use the partition shards, dirichlet or iid"
        )
    group_numbers = range(len(dataset.groups))
    num_known = len(dataset.groups) - dataset.num_novel
    clients_of_group = _clients_of_group("num_clients", num_clients, group_numbers[:num_known])
    if novel_clients:
        clients_of_group |= _clients_of_group(
            "holdout_clients", novel_clients, group_numbers[num_known:]
        )
    rows, test_rows = group_rows(
        labels, train.group, train.original, clients_of_group, shards_per_client, seed, split
    )
    names = [
        f"{dataset.groups[g]} {k}" for g, count in clients_of_group.items() for k in range(count)
    ]
    all_clients = Clients.from_pool(
        dataset, rows, test_rows, np.concatenate(rows[:num_clients]), names
    )
    novel = range(num_clients, len(all_clients))
    return all_clients.select(range(num_clients)), all_clients.select(novel) if novel else None


def _clients_of_group(setting: str, count: int, group_numbers: range) -> dict[int, int]:
    """Divide `count` clients equally among groups; `setting` is the name of the count."""
    if count % len(group_numbers):
        raise InputError(
            f"{setting}={count}, but there are {len(group_numbers)} groups: give a multiple of "
            f"{len(group_numbers)}"
        )
    return {g: count // len(group_numbers) for g in group_numbers}


def shard_rows(
    labels: np.ndarray,
    test_labels: np.ndarray,
    num_clients: int,
    shards_per_client: int,
    seed: int = 0,
) -> tuple[Rows, Rows]:
    """Return the rows of each client under the shard partition.

    A shuffled list of classes, one entry per shard, is laid out as a matrix [N, s]; row k has the
    classes of client k, for training and for test examples. The numbers of shards of the classes
    are proportional to their numbers of training examples, and at least one.

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
    settings = (
        f"num_clients={num_clients} with shards_per_client={shards_per_client} makes {total} shards"
    )
    if total < len(split.train_sizes):
        raise InputError(
            f"{settings}, fewer than the {len(split.train_sizes)} classes: use more clients or "
            "more shards per client"
        )
    if total > len(labels):
        raise InputError(
            f"{settings}, more than the {len(labels)} training examples: use fewer clients or "
            "fewer shards per client"
        )
    if (split.train_sizes == 0).any():
        name = split.names[split.train_sizes.argmin()]
        raise InputError(
            f"class {name} has test examples but no training examples: remove them, or add "
            "training examples"
        )
    shards_of_class = allot(split.train_sizes, total)

    for attempt in range(MAX_ATTEMPTS):
        rng = np.random.default_rng([_SHARDS, seed, attempt])
        # The matrix of classes [N * s], row by row.
        class_of_slot = rng.permutation(np.repeat(np.arange(len(shards_of_class)), shards_of_class))
        holders = []
        for classes, sizes in ((split.train, split.train_sizes), (split.test, split.test_sizes)):
            # The slots of a class get its shards in random order: slots sorted by class have the
            # same order as the shards.
            slot_of_shard = np.lexsort((rng.random(total), class_of_slot))
            shard = _shard_of_example(classes, sizes, shards_of_class)
            holders.append(slot_of_shard[shard] // shards_per_client)
        if _all_hold(holders[1], num_clients):
            return _gather(holders[0], num_clients), _gather(holders[1], num_clients)
    raise InputError(
        f"{settings}: with {len(test_labels)} test examples some client always ends up without any "
        f"({MAX_ATTEMPTS} attempts): use fewer clients, or more shards per client"
    )


def dirichlet_rows(
    labels: np.ndarray, test_labels: np.ndarray, num_clients: int, alpha: float, seed: int = 0
) -> tuple[Rows, Rows]:
    """Return the rows of each client under the Dirichlet partition.

    The same proportions divide the training and the test examples.

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
        # The order of the clients is another one for each class; else rounding would favour the
        # same clients in every class.
        turns = rng.permuted(np.tile(np.arange(num_clients), (num_classes, 1)), axis=1)
        holders = [
            _cut(classes, sizes, proportions, turns, rng)
            for classes, sizes in ((split.train, split.train_sizes), (split.test, split.test_sizes))
        ]
        if all(_all_hold(holder, num_clients) for holder in holders):
            return _gather(holders[0], num_clients), _gather(holders[1], num_clients)
    raise InputError(
        f"alpha={alpha} with num_clients={num_clients}: some client always ends up without "
        f"training or test examples ({MAX_ATTEMPTS} attempts): use a larger alpha or fewer clients"
    )


def iid_rows(num_train: int, num_test: int, num_clients: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Return the rows of each client when n training and m test examples are dealt at random."""
    _check_counts(num_clients, num_train, num_test, seed)
    rng = np.random.default_rng([_IID, seed])
    train, test = (
        np.array_split(rng.permutation(count), num_clients) for count in (num_train, num_test)
    )
    return [np.sort(rows) for rows in train], [np.sort(rows) for rows in test]


def natural_rows(client: np.ndarray, test_client: np.ndarray) -> tuple[Rows, Rows]:
    """Return the rows of each client from the client of each training [n] and test example [m].

    A client may have no test examples.
    """
    names, holder = np.unique(client, return_inverse=True)
    untrained = np.setdiff1d(test_client, names)
    if len(untrained):
        listed = ", ".join(map(str, untrained[:5].tolist()))
        if len(untrained) > 5:
            listed += f" and {len(untrained) - 5} more"
        raise InputError(
            f"clients with test examples but no training examples: {listed}. Leave them out, or "
            "give each a training example"
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
    """Return the rows of each client, group after group; a tenth of every class is for testing.

    Args:
        labels: classes of the examples [n].
        group: the group of each example [n].
        original: the number of the image that each example was made from [n]; copies of one image
            in several groups have the same number.
        clients_of_group: how many clients hold the examples of each group.
        shards_per_client: s.
        seed: equal seeds give equal partitions.
        split: "image" holds back the same originals in every group, so that no copy of a test image
            is trained on; "group" draws test images in each group anew, as the paper does, so that
            copies of test images are trained on in other groups.
    """
    if split not in GROUP_SPLITS:
        raise InputError(f"group_split={split!r}: choose from {', '.join(GROUP_SPLITS)}")
    held_back = np.zeros(len(labels), dtype=bool)
    if split == "image":
        _, first, number = np.unique(original, return_index=True, return_inverse=True)
        rng = np.random.default_rng([_GROUPS, seed])
        held_back = _draw_test_examples(labels[first], rng)[number]
    train_rows, test_rows = [], []
    for g, count in clients_of_group.items():
        members = np.flatnonzero(group == g)
        if split == "group":
            rng = np.random.default_rng([_GROUPS, seed, g])
            held_back[members] = _draw_test_examples(labels[members], rng)
        train, test = members[~held_back[members]], members[held_back[members]]
        group_seed = int(np.random.SeedSequence([_GROUPS, seed, g]).generate_state(1)[0])
        train_shards, test_shards = shard_rows(
            labels[train], labels[test], count, shards_per_client, group_seed
        )
        train_rows += [train[rows] for rows in train_shards]
        test_rows += [test[rows] for rows in test_shards]
    return train_rows, test_rows


def _draw_test_examples(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw TEST_SHARE of each class at random; return whether each example is drawn [n]."""
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
    # Tiny classes got more than their quota; those furthest above theirs give seats back.
    while seats.sum() > total:
        surplus = np.where(seats > 1, seats * whole - quota, np.iinfo(np.int64).min)
        seats[np.argmax(surplus)] -= 1
    return seats


class _Classes:
    """Training and test labels renumbered 0..C-1 over the classes that occur.

    Attributes:
        names: the classes before the renumbering [C].
        train, test: the class of each example [n], [m].
        train_sizes, test_sizes: the number of examples of each class [C].
    """

    def __init__(self, labels: np.ndarray, test_labels: np.ndarray) -> None:
        self.names, classes = np.unique(np.concatenate([labels, test_labels]), return_inverse=True)
        self.train, self.test = classes[: len(labels)], classes[len(labels) :]
        self.train_sizes = np.bincount(self.train, minlength=len(self.names))
        self.test_sizes = np.bincount(self.test, minlength=len(self.names))


def _place_in_class(classes: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the place of each example in its class [n]; `order` lists the examples by class."""
    place = np.empty(len(classes), dtype=np.int64)
    place[order] = np.arange(len(classes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def _shard_of_example(
    classes: np.ndarray, sizes: np.ndarray, shards_of_class: np.ndarray
) -> np.ndarray:
    """Return the shard of each example [n]; shards are numbered class by class.

    A class is cut into equal shards in the order of the data. If that leaves examples over, they go
    to its first shards, one to each.
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
    """Shuffle every class and cut it in `proportions` [C, N] for the clients `turns` [C, N].

    Returns:
        The client of each example [n].
    """
    order = np.lexsort((rng.random(len(classes)), classes))
    cuts = np.floor(np.cumsum(proportions, axis=1) * sizes[:, None] + 0.5).astype(np.int64)
    cuts[:, -1] = sizes  # the sum may be rounded below 1, which would lose examples
    cuts = np.minimum(cuts, sizes[:, None]) + (np.cumsum(sizes) - sizes)[:, None]
    # The cuts of all classes ascend, so one search finds the class and client of every example.
    places = np.searchsorted(cuts.ravel(), np.arange(len(classes)), side="right")
    holder = np.empty(len(classes), dtype=np.int64)
    holder[order] = turns.ravel()[places]
    return holder


def _gather(holder: np.ndarray, num_clients: int) -> Rows:
    """Return the rows of each client, from the client of each row."""
    order = np.argsort(holder, kind="stable")
    return np.split(order, np.cumsum(np.bincount(holder, minlength=num_clients))[:-1])


def _all_hold(holder: np.ndarray, num_clients: int) -> bool:
    """Return whether every client holds an example, or there are no examples."""
    return len(holder) == 0 or bool((np.bincount(holder, minlength=num_clients) > 0).all())


def _labels(dataset: Dataset, partition: str) -> tuple[np.ndarray, np.ndarray]:
    if dataset.num_classes is None or dataset.train.y.dtype.kind not in "iub":
        raise InputError(
            f"partition {partition} needs class labels, but data set {dataset.name} has real "
            "targets: use the partition iid, or natural if the data name the clients"
        )
    return dataset.train.y, dataset.test.y


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name}={value}: give a whole number of at least 1")


def _check_counts(num_clients: int, num_train: int, num_test: int, seed: int) -> None:
    _check_integer("num_clients", num_clients)
    for count, split in ((num_train, "training"), (num_test, "test")):
        if num_clients > count and (count > 0 or split == "training"):
            raise InputError(
                f"num_clients={num_clients}, but there are only {count} {split} examples: use at "
                f"most {count} clients"
            )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed={seed}: give a whole number of at least 0")
