"""Partitions: every example has one holder, training and test match, the shards are FedBABU's."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from partitions import assert_partition, counts, dataset, labels_strategy, same

from fedhb import data
from fedhb.clients import partition
from fedhb.clients.partition import allot, dirichlet_rows, iid_rows, natural_rows, shard_rows
from fedhb.errors import InputError


@given(
    labels_strategy, labels_strategy, st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**31)
)
def test_shards_partition_and_match(train, test, num_clients, per_client, seed):
    test = train[test % len(train)]  # every test class has training examples
    assume(len(np.unique(train)) <= num_clients * per_client <= len(train))
    try:
        rows, test_rows = shard_rows(train, test, num_clients, per_client, seed)
    except InputError as error:
        assert "test examples" in str(error)
        assume(False)
    assert len(rows) == len(test_rows) == num_clients
    assert_partition(rows, len(train))
    assert_partition(test_rows, len(test))
    held, held_test = counts(rows, train, 7), counts(test_rows, test, 7)
    assert ((held > 0).sum(axis=1) <= per_client).all()
    assert (held_test[held == 0] == 0).all()  # a client is tested on classes that it trains on
    assert (held.sum(axis=1) > 0).all() and (held_test.sum(axis=1) > 0).all()
    assert same((rows, test_rows), shard_rows(train, test, num_clients, per_client, seed))


def test_shards_of_equal_classes_are_fedbabus():
    train, test = np.repeat(np.arange(10), 600), np.repeat(np.arange(10), 100)
    rng = np.random.default_rng(0)
    train, test = rng.permutation(train), rng.permutation(test)
    rows, test_rows = shard_rows(train, test, 100, 5, seed=1)
    held, held_test = counts(rows, train, 10), counts(test_rows, test, 10)
    assert (held.sum(axis=1) == 60).all() and (held_test.sum(axis=1) == 10).all()
    np.testing.assert_array_equal(
        held, 6 * held_test
    )  # the same matrix of classes, shards of 12 and 2
    assert (
        set(np.unique(held)) <= {0, 12, 24, 36, 48, 60} and (held == 24).any()
    )  # a class may be dealt twice


@pytest.mark.parametrize(
    ("classes", "per_client", "distinct"), [(10, 5, 4.13), (100, 10, 9.60), (100, 100, 63.6)]
)
def test_mean_number_of_distinct_classes(classes, per_client, distinct):
    train, test = (
        np.repeat(np.arange(classes), 100 * per_client // classes * 2),
        np.arange(classes * 10) % classes,
    )
    means = []
    for seed in range(10):
        rows, _ = shard_rows(train, np.repeat(test, 10), 100, per_client, seed)
        means.append((counts(rows, train, classes) > 0).sum(axis=1).mean())
    assert all(abs(mean - distinct) < 0.15 * max(1, distinct / 5) for mean in means)
    assert abs(np.mean(means) - distinct) < 0.05 * max(1, distinct / 10)


def test_shards_follow_the_order_of_the_data_and_leftovers_go_to_the_first():
    # One class of 11 examples in 4 shards: 0-1, 2-3, 4-5, 6-7, then 8, 9, 10 to the first three.
    rows, test_rows = shard_rows(np.zeros(11, int), np.zeros(4, int), 4, 1, seed=0)
    assert sorted(held.tolist() for held in rows) == [[0, 1, 8], [2, 3, 9], [4, 5, 10], [6, 7]]
    assert sorted(held.tolist() for held in test_rows) == [[0], [1], [2], [3]]


def test_unequal_classes_get_shards_by_size():
    train = np.repeat([0, 1, 2], [600, 300, 100])
    rows, _ = shard_rows(train, train, 10, 2, seed=0)
    held = counts(rows, train, 3)
    assert (held.sum(axis=1) == 100).all() and (held % 50 == 0).all()  # 12, 6 and 2 shards of 50


def test_seeds_give_different_shards():
    train = np.repeat(np.arange(10), 60)
    assert not same(shard_rows(train, train, 20, 3, 0), shard_rows(train, train, 20, 3, 1))


def test_train_and_test_shards_are_dealt_independently():
    # With leftovers in both splits, a client lucky in one must not always be lucky in the other.
    labels = np.zeros(150, int)
    rows, test_rows = shard_rows(labels, labels, 100, 1, seed=0)
    lucky, lucky_test = (np.array([len(held) == 2 for held in part]) for part in (rows, test_rows))
    assert lucky.sum() == lucky_test.sum() == 50 and 10 < (lucky & lucky_test).sum() < 40


def test_few_test_examples_still_reach_every_client():
    train, test = (
        np.repeat(np.arange(10), 144),
        np.repeat(np.arange(10), 36),
    )  # 50 shards of each class
    for seed in range(20):
        _, test_rows = shard_rows(train, test, 100, 5, seed)
        assert min(map(len, test_rows)) > 0
        assert_partition(test_rows, 360)


@pytest.mark.parametrize(
    ("clients", "per_client", "says"),
    [
        (0, 5, "num_clients=0"),
        (-3, 5, "num_clients=-3"),
        (2.5, 5, "num_clients=2.5"),
        (True, 5, "num_clients=True"),
        (5, 0, "shards_per_client=0"),
        (3, 1, "3 shards.*4 classes"),
        (8, 6, "48 shards.*40 training"),
        (41, 1, "num_clients=41.*40 training"),
        (9, 1, "num_clients=9.*8 test"),
    ],
)
def test_impossible_shards_are_refused(clients, per_client, says):
    train, test = np.repeat(np.arange(4), 10), np.repeat(np.arange(4), 2)
    with pytest.raises(InputError, match=says):
        shard_rows(train, test, clients, per_client)


def test_a_client_without_test_examples_is_refused_in_the_end():
    # Two shards of class 1, one of its examples in the test set: whoever gets the other shard has
    # none.
    train, test = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    with pytest.raises(InputError, match="fewer clients"):
        shard_rows(train, test, 4, 1)


def test_a_class_without_training_examples_is_refused():
    with pytest.raises(InputError, match="class 7 "):
        shard_rows(np.zeros(10, int), np.array([0, 0, 0, 7]), 2, 1)


@pytest.mark.parametrize("seed", [-1, 1.5])
def test_bad_seeds_are_refused(seed):
    for draw in (
        lambda: shard_rows(np.zeros(9, int), np.zeros(9, int), 3, 1, seed),
        lambda: iid_rows(9, 9, 3, seed),
    ):
        with pytest.raises(InputError, match=f"seed={seed}"):
            draw()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(0, 500))
def test_allot(sizes, more):
    sizes, total = np.array(sizes), len(sizes) + more
    seats = allot(sizes, total)
    quota = total * sizes / sizes.sum()
    assert seats.sum() == total and seats.min() >= 1
    if (quota >= 1).all():
        assert (np.abs(seats - quota) < 1).all()
    if total <= sizes.sum():
        assert (seats <= sizes).all()


@given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 20))
def test_allot_is_equal_where_classes_are(classes, size, each):
    assert (allot(np.full(classes, size), classes * each) == each).all()


def test_clients_hold_what_the_rows_say():
    toy = dataset(np.repeat(np.arange(4), 30), np.repeat(np.arange(4), 10), 4)
    for clients, rows in (
        (partition.shards(toy, 6, 2, seed=3), shard_rows(toy.train.y, toy.test.y, 6, 2, 3)),
        (
            partition.dirichlet(toy, 6, 5.0, seed=3),
            dirichlet_rows(toy.train.y, toy.test.y, 6, 5.0, 3),
        ),
        (partition.iid(toy, 6, seed=3), iid_rows(120, 40, 6, 3)),
    ):
        assert (
            clients.ids.tolist() == list(range(6))
            and clients.num_classes == 4
            and clients.test is not None
        )
        for k in range(6):
            np.testing.assert_array_equal(clients.train.rows_of(k), rows[0][k])
            np.testing.assert_array_equal(clients.test.rows_of(k), rows[1][k])


def test_data_without_test_examples():
    toy = dataset(np.repeat([0, 1], 20), np.zeros(0, int), 2, held_by=np.arange(40) % 5)
    for clients in (
        partition.shards(toy, 5, 2),
        partition.dirichlet(toy, 5, 10.0),
        partition.iid(toy, 5),
        partition.natural(toy),
    ):
        assert len(clients) == 5 and clients.test is None and clients.num_examples == 40


def test_regression_has_no_classes():
    toy = dataset(np.linspace(0, 1, 20), np.linspace(0, 1, 10))
    for draw in (lambda: partition.shards(toy, 2, 2), lambda: partition.dirichlet(toy, 2, 1.0)):
        with pytest.raises(InputError, match="class"):
            draw()
    assert len(partition.iid(toy, 5)) == 5


def test_one_class_and_one_client():
    one = np.zeros(20, int)
    assert [len(held) for held in shard_rows(one, one, 5, 2)[0]] == [4] * 5
    assert [len(held) for held in dirichlet_rows(one, one, 1, 0.1)[0]] == [20]
    assert [len(held) for held in shard_rows(one, one, 1, 1)[1]] == [20]


def test_labels_need_not_be_consecutive():
    train = np.repeat([3, 40, 41], 20)
    rows, _ = shard_rows(train, train, 6, 1)
    assert_partition(rows, 60)
    assert all(len(np.unique(train[held])) == 1 for held in rows)


def test_a_thousand_clients_take_no_time():
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 10, 60_000), rng.integers(0, 10, 10_000)
    start = time.perf_counter()
    shard_rows(train, test, 1000, 5)
    dirichlet_rows(train, test, 1000, 1.0)
    iid_rows(60_000, 10_000, 1000)
    natural_rows(np.arange(60_000) % 1000, np.arange(10_000) % 1000)
    assert time.perf_counter() - start < 2  # 0.1 s; a loop over examples would take far longer


@pytest.mark.slow
@pytest.mark.skipif("FEDHB_DATA" not in os.environ, reason="FEDHB_DATA names no real data")
def test_real_mnist():
    if not next(record for record in data.status() if record.name == "mnist").present:
        pytest.skip("mnist is not there")
    mnist = data.load("mnist")
    clients = partition.shards(mnist, 100, 5)
    assert (
        clients.num_examples == 60_000 and clients.sizes.min() > 550 and clients.sizes.max() < 650
    )
    rows, test_rows = shard_rows(mnist.train.y, mnist.test.y, 100, 5)
    held, held_test = counts(rows, mnist.train.y, 10), counts(test_rows, mnist.test.y, 10)
    np.testing.assert_array_equal(held > 0, held_test > 0)
    assert (held > 0).sum(axis=1).mean() == pytest.approx(4.13, abs=0.15)


def held(share, k):
    x, y = share.examples(k)
    return set(x[:, 0].tolist()), set(x[:, 1].tolist()), y
