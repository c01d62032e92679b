"""Clients: what is refused, splits that neither lose nor share an example, ids that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import arrays
from fitted import fit
from hypothesis import given
from hypothesis import strategies as st

import fedhb
from fedhb.clients.clients import Clients
from fedhb.data import Dataset, Examples
from fedhb.errors import InputError


def test_ids_that_are_no_names_of_files_are_refused():
    for wrong in (-1, 10**18):
        with pytest.raises(InputError, match=f"id {wrong}"):
            Clients.from_arrays(arrays([5] * 3), ids=[0, wrong, 3])
    run = fit(
        None,
        Clients.from_arrays(arrays([5] * 3), ids=[0, 10**18 - 1, 3]),
        fedhb.LocalOnly(),
        fraction=1.0,
    )
    assert sorted(run.state.store.memories) == [0, 3, 10**18 - 1]


def pairs(sizes, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 2)), rng.integers(0, classes, n)) for n in sizes]


def rows(share, k):
    return share.rows_of(k).tolist()


def test_from_arrays_keeps_every_pair():
    train, test = pairs((4, 1, 3)), pairs((2, 2, 2), seed=1)
    clients = Clients.from_arrays(train, test, num_classes=5)
    assert len(clients) == 3 and clients.sizes.tolist() == [4, 1, 3] and clients.num_examples == 8
    assert clients.num_classes == 5 and clients.test is not None
    for k in range(3):
        for share, given_pairs in ((clients.train, train), (clients.test, test)):
            x, y = share.examples(k)
            np.testing.assert_allclose(x, given_pairs[k][0].astype(np.float32))
            np.testing.assert_array_equal(y, given_pairs[k][1])
            assert x.dtype == torch.float32 and y.dtype == torch.int64


@pytest.mark.parametrize("most", [1, 3, 9, 59, 60, 100])
def test_a_part_of_a_clients_examples_has_its_classes_in_proportion(most):
    """Rows in order of class, as shards are: each class has its share of the part, to within one
    example.
    """
    y = np.repeat([0, 1, 2], 20)
    clients = Clients.from_arrays(
        [(np.zeros((5, 1)), np.zeros(5, int)), (np.arange(60.0)[:, None], y)]
    )
    x, labels = clients.train.examples(1, most)
    assert len(labels) == min(most, 60) == len(x.unique()) and set(x.flatten().tolist()) <= set(
        range(60)
    )
    assert labels.tolist() == y[x.flatten().long().numpy()].tolist()
    assert (np.abs(np.bincount(labels, minlength=3) - min(most, 60) / 3) < 1).all()


def test_the_number_of_classes_counts_test_labels_too():
    x = np.zeros((1, 2))
    assert Clients.from_arrays([(x, np.array([1]))], [(x, np.array([4]))]).num_classes == 5


def test_real_targets_are_regression():
    clients = Clients.from_arrays([(np.zeros((2, 1)), np.array([0.5, 1.5]))])
    assert (
        clients.num_classes is None
        and clients.train.y.dtype == torch.float32
        and clients.test is None
    )


def test_images_stay_as_stored():
    clients = Clients.from_arrays([(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, int))])
    assert clients.train.x.dtype == torch.uint8


X, Y = np.zeros((2, 2)), np.zeros(2, int)


@pytest.mark.parametrize("nothing", [([], []), (X[:0], Y[:0])])
def test_a_client_may_have_no_test_examples(nothing):
    clients = Clients.from_arrays([(X, Y), (X, Y), (X, Y)], [nothing, (X, Y), nothing])
    assert clients.test is not None and clients.test.sizes.tolist() == [0, len(Y), 0]
    assert torch.equal(clients.test.examples(1)[0], torch.from_numpy(X).float())
    assert clients.has("train") and clients.has("test") and not clients.has("validation")
    none = clients.select([0, 2])
    assert not none.has("test") and len(none.test.examples(1)[0]) == 0
    assert Clients.from_arrays([(X, Y), (X, Y)], [nothing, nothing]).test is None


@pytest.mark.parametrize("ids", [[1], [1, 1]])
def test_ids_are_one_per_client_and_distinct(ids):
    with pytest.raises(InputError):
        Clients.from_arrays([(X, Y), (X, Y)], ids=ids)


def test_from_rows_without_test_examples():
    train, test = (
        Examples(np.ones((3, 2), np.float32), np.zeros(3, int)),
        Examples(np.ones((0, 2), np.float32), Y[:0]),
    )
    assert (
        Clients.from_rows(Dataset("mine", train, test, 1), [np.arange(3)], [np.arange(0)]).test
        is None
    )


def test_a_users_table_is_not_cropped_whatever_its_name():
    part = Examples(np.ones((3, 2), np.float32), np.zeros(3, int))
    assert (
        Clients.from_rows(
            Dataset("cifar-features", part, part, 1), [np.arange(3)], [np.arange(3)]
        ).augment
        is None
    )


def test_from_rows_keeps_the_data_sets_facts():
    rng = np.random.default_rng(0)
    part = Examples(rng.integers(0, 256, (6, 3, 4, 4), dtype=np.uint8), np.arange(6) % 2)
    clients = Clients.from_rows(
        Dataset("cifar-100", part, part, 2, {"f": "hash"}),
        [np.array([0, 5]), np.array([2])],
        [np.array([1]), np.array([3])],
    )
    assert (clients.name, clients.files, clients.augment) == (
        "cifar-100",
        {"f": "hash"},
        "crop-flip",
    )
    assert clients.train.x.dtype == torch.uint8 and clients.train.examples(0)[1].tolist() == [0, 1]
    scaled = clients.scaling(
        clients.train.x, torch.float32
    )  # by all training examples, held or not
    torch.testing.assert_close(scaled.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(dim=(0, 2, 3), unbiased=False), torch.ones(3))


def test_sizes_are_counted_once_however_often_they_are_asked_for():
    """Else a round that asks for the size of each of its clients would cost as much as there are
    clients in all.
    """
    clients = Clients.from_arrays(pairs((4, 1, 3)))
    assert clients.sizes is clients.sizes
    assert clients.select([2, 0]).sizes.tolist() == [3, 4] and clients.sizes.tolist() == [4, 1, 3]


def test_at_most_so_many_examples():
    clients = Clients.from_arrays(pairs((4, 1, 30)), pairs((1, 1, 1)), ids=[7, 8, 9])
    few, more = clients.with_at_most(3, seed=0), clients.with_at_most(12, seed=0)
    assert (
        few.sizes.tolist() == [3, 1, 3]
        and more.sizes.tolist() == [4, 1, 12]
        and few.test is clients.test
    )
    for k in range(3):
        assert (
            set(few.train.rows_of(k).tolist())
            <= set(more.train.rows_of(k).tolist())
            <= set(clients.train.rows_of(k).tolist())
        )
    assert few.train.rows.tolist() != clients.with_at_most(3, seed=1).train.rows.tolist()
    alone = clients.select([2]).with_at_most(
        3, seed=0
    )  # a client's examples do not depend on who else is there
    assert alone.train.rows.tolist() == few.train.rows_of(2).tolist()
    with pytest.raises(InputError, match="max_examples=0"):
        clients.with_at_most(0, seed=0)


def test_select_keeps_ids_and_examples():
    clients = Clients.from_arrays(
        pairs((2, 3, 4, 5)), pairs((1, 1, 1, 1)), ids=[10, 20, 30, 40]
    ).with_validation(0.4, 0)
    chosen = clients.select([3, 1])
    assert (
        chosen.ids.tolist() == [40, 20]
        and chosen.validation is not None
        and chosen.test is not None
    )
    assert chosen.train.x is clients.train.x  # nothing is copied
    for new, old in ((0, 3), (1, 1)):
        for name in ("train", "validation", "test"):
            assert rows(getattr(chosen, name), new) == rows(getattr(clients, name), old)
    assert chosen.select([1]).ids.tolist() == [20]


@given(st.integers(2, 30), st.data())
def test_hold_out_is_disjoint_and_covers(n, draw):
    count, seed = draw.draw(st.integers(1, n - 1)), draw.draw(st.integers(0, 1000))
    clients = Clients.from_arrays(pairs([1] * n))
    kept, novel = clients.hold_out(count, seed)
    assert len(novel) == count
    assert sorted(kept.ids.tolist() + novel.ids.tolist()) == list(range(n))
    assert sorted(kept.train.rows.tolist() + novel.train.rows.tolist()) == list(range(n))
    assert clients.hold_out(count, seed)[1].ids.tolist() == novel.ids.tolist()


def test_hold_out_depends_on_the_seed():
    clients = Clients.from_arrays(pairs([1] * 30))
    assert len({tuple(clients.hold_out(10, seed)[1].ids.tolist()) for seed in range(5)}) > 1


@pytest.mark.parametrize("count", [0, -1, 3, 4])
def test_hold_out_leaves_somebody(count):
    with pytest.raises(InputError, match=f"holdout_clients={count}.*3"):
        Clients.from_arrays(pairs([1] * 3)).hold_out(count, 0)


@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
    st.integers(0, 1000),
)
def test_validation_is_disjoint_and_covers(sizes, fraction, seed):
    clients = Clients.from_arrays(pairs(sizes))
    split = clients.with_validation(fraction, seed)
    assert split.validation is not None
    for k, size in enumerate(sizes):
        kept, held = rows(split.train, k), rows(split.validation, k)
        assert sorted(kept + held) == rows(clients.train, k) and kept
        assert len(held) == min(max(1, round(fraction * size)), size - 1)


def test_a_clients_validation_examples_do_not_depend_on_the_others():
    clients = Clients.from_arrays(pairs((9, 9, 9)))
    whole = clients.with_validation(0.3, 0).validation
    alone = clients.select([2]).with_validation(0.3, 0).validation
    assert whole is not None and alone is not None
    assert rows(whole, 2) == rows(alone, 0)
    assert [row - 18 for row in rows(whole, 2)] != rows(whole, 0)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_validation_refuses_a_share_that_is_none(fraction):
    with pytest.raises(InputError, match=f"validation={fraction}"):
        Clients.from_arrays(pairs([5])).with_validation(fraction, 0)


def test_names_are_what_results_call_the_clients():
    pair = np.zeros((2, 3)), np.array([0, 1])
    assert Clients.from_arrays([pair, pair], names=["north", "south"]).select([1]).names == (
        "south",
    )
    with pytest.raises(InputError, match=r"1 .*2 clients"):
        Clients.from_arrays([pair, pair], names=["north"])
