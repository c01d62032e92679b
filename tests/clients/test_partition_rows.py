"""Dirichlet, uniform and natural partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from partitions import assert_partition, counts, dataset, labels_strategy, same

from fedhb.clients import partition
from fedhb.clients.partition import dirichlet_rows, iid_rows, natural_rows
from fedhb.errors import InputError


@given(
    labels_strategy, labels_strategy, st.integers(1, 8), st.floats(0.05, 1e4), st.integers(0, 2**31)
)
def test_dirichlet_partitions(train, test, num_clients, alpha, seed):
    try:
        rows, test_rows = dirichlet_rows(train, test, num_clients, alpha, seed)
    except InputError as error:
        assert "larger alpha" in str(error)
        assume(False)
    assert len(rows) == len(test_rows) == num_clients
    assert_partition(rows, len(train))
    assert_partition(test_rows, len(test))
    assert min(map(len, rows)) > 0 and min(map(len, test_rows)) > 0
    assert same((rows, test_rows), dirichlet_rows(train, test, num_clients, alpha, seed))


@settings(max_examples=30)
@given(st.floats(0.1, 50), st.integers(0, 2**31))
def test_dirichlet_proportions_match_in_train_and_test(alpha, seed):
    train, test = np.repeat(np.arange(5), 2000), np.repeat(np.arange(5), 500)
    rows, test_rows = dirichlet_rows(train, test, 10, alpha, seed)
    held, held_test = counts(rows, train, 5), counts(test_rows, test, 5)
    assert (
        np.abs(held / 2000 - held_test / 500) <= 1 / 2000 + 1 / 500
    ).all()  # both edges of a cut are rounded


@pytest.mark.parametrize("alpha", [1e9, 1e300, float("inf")])
def test_a_large_alpha_is_uniform(alpha):
    train, test = np.repeat(np.arange(4), 1000), np.repeat(np.arange(4), 200)
    rows, test_rows = dirichlet_rows(train, test, 20, alpha)
    assert (np.abs(counts(rows, train, 4) - 50) <= 1).all()
    assert (np.abs(counts(test_rows, test, 4) - 10) <= 1).all()


def test_a_large_alpha_spreads_few_test_examples_over_all_clients():
    train, test = (
        np.repeat(np.arange(10), 100),
        np.repeat(np.arange(10), 6),
    )  # 6 test examples of a class, 10 clients
    _, test_rows = dirichlet_rows(train, test, 10, float("inf"))
    assert min(map(len, test_rows)) > 0


def test_the_proportions_have_the_dirichlets_variance():
    train = np.repeat(np.arange(200), 1000)
    for alpha in (0.3, 3.0):
        rows, _ = dirichlet_rows(train, train, 10, alpha, seed=5)
        share = counts(rows, train, 200) / 1000
        assert share.var() == pytest.approx(0.1 * 0.9 / (10 * alpha + 1), rel=0.15)


def test_examples_of_a_class_are_shuffled():
    rows, _ = dirichlet_rows(np.zeros(1000, int), np.zeros(1000, int), 4, 100.0)
    assert all(350 < held.mean() < 650 for held in rows)


def test_seeds_give_different_proportions():
    train = np.repeat(np.arange(10), 60)
    assert not same(
        dirichlet_rows(train, train, 5, 1.0, 0), dirichlet_rows(train, train, 5, 1.0, 1)
    )


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan")])
def test_bad_alphas_are_refused(alpha):
    with pytest.raises(InputError, match=f"alpha={alpha}"):
        dirichlet_rows(np.zeros(10, int), np.zeros(10, int), 2, alpha)


def test_an_alpha_that_leaves_clients_empty_is_refused_in_the_end():
    with pytest.raises(InputError, match=r"alpha=0.001.*num_clients=20"):
        dirichlet_rows(np.zeros(100, int), np.zeros(100, int), 20, 0.001)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 50), st.integers(0, 2**31))
def test_iid_partitions_evenly(n, m, num_clients, seed):
    assume(num_clients <= n and (m == 0 or num_clients <= m))
    rows, test_rows = iid_rows(n, m, num_clients, seed)
    for part, size in ((rows, n), (test_rows, m)):
        assert len(part) == num_clients
        assert_partition(part, size)
        assert np.ptp([len(held) for held in part]) <= 1
    assert same((rows, test_rows), iid_rows(n, m, num_clients, seed))


def test_iid_is_random():
    rows, _ = iid_rows(1000, 1000, 4, 0)
    assert all(400 < held.mean() < 600 for held in rows)
    assert not same(iid_rows(100, 100, 4, 0), iid_rows(100, 100, 4, 1))


@pytest.mark.parametrize("names", [[7, -2, 7, 30, -2], ["b", "a", "b", "c", "a"]])
def test_natural_numbers_clients_in_the_order_of_their_names(names):
    rows, test_rows = natural_rows(np.array(names), np.array(names[::-1]))
    assert [held.tolist() for held in rows] == [[1, 4], [0, 2], [3]]
    assert [held.tolist() for held in test_rows] == [[0, 3], [2, 4], [1]]


@pytest.mark.parametrize("tested", [["d", "b", "d"], []])
def test_natural_clients_may_have_no_test_examples(tested):
    rows, test_rows = natural_rows(
        np.array(["a", "b", "c", "d", "a"]), np.array(tested, dtype="U9")
    )
    assert [held.tolist() for held in rows] == [[0, 4], [1], [2], [3]]
    assert [held.tolist() for held in test_rows] == (
        [[], [1], [], [0, 2]] if tested else [[], [], [], []]
    )


def test_clients_that_only_test_are_named():
    with pytest.raises(InputError, match=r"1, 2, 3, 4, 5.* 2 more"):
        natural_rows(np.array([0]), np.arange(8))


def test_natural_needs_a_client_column():
    with pytest.raises(InputError, match="client"):
        partition.natural(dataset([0, 1], [0, 1], 2))
    toy = dataset(
        [0, 1, 0], [1, 0], 2, held_by=np.array(["x", "y", "x"]), test_by=np.array(["y", "x"])
    )
    assert partition.natural(toy).sizes.tolist() == [2, 1]


def held(share, k):
    x, y = share.examples(k)
    return set(x[:, 0].tolist()), set(x[:, 1].tolist()), y
