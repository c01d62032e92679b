"""Partitions: every example has one holder, training and test match, the shards are FedBABU's."""

import os
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedhb import data
from fedhb.clients import partition
from fedhb.clients.partition import allot, dirichlet_rows, iid_rows, natural_rows, shard_rows
from fedhb.data import Dataset, Examples
from fedhb.errors import InputError
from fedhb.runs.from_settings import make_clients
from fedhb.runs.settings import Settings


def dataset(train, test, num_classes=None, **clients) -> Dataset:
    train, test = np.asarray(train), np.asarray(test)
    x, x_test = (np.zeros((len(y), 2), np.uint8) for y in (train, test))
    return Dataset(
        "toy",
        Examples(x, train, clients.get("held_by")),
        Examples(x_test, test, clients.get("test_by")),
        num_classes,
    )


def counts(rows, labels, classes) -> np.ndarray:
    """Examples per client and class [N, C]."""
    return np.stack([np.bincount(labels[held], minlength=classes) for held in rows])


def assert_partition(rows, n) -> None:
    """Disjoint, covering, ascending within a client."""
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(n))
    for held in rows:
        assert held.dtype == np.int64 and (np.diff(held) > 0).all()


def same(a, b) -> bool:
    return all(
        np.array_equal(p, q)
        for first, second in zip(a, b, strict=True)
        for p, q in zip(first, second, strict=True)
    )


labels_strategy = st.lists(st.integers(0, 6), min_size=12, max_size=150).map(np.array)


# ---- shards


@given(
    labels_strategy, labels_strategy, st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**31)
)
def test_shards_partition_and_match(train, test, num_clients, per_client, seed):
    test = train[test % len(train)]  # every test class has training examples
    assume(len(np.unique(train)) <= num_clients * per_client <= len(train))
    try:
        rows, test_rows = shard_rows(train, test, num_clients, per_client, seed)
    except InputError as error:
        assert "test examples some client always ends up without any" in str(error)
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
        (0, 5, "num_clients=0: give a whole number"),
        (-3, 5, "num_clients=-3"),
        (2.5, 5, "num_clients=2.5"),
        (True, 5, "num_clients=True"),
        (5, 0, "shards_per_client=0"),
        (3, 1, "makes 3 shards, fewer than the 4 classes"),
        (8, 6, "makes 48 shards, more than the 40 training examples"),
        (41, 1, "num_clients=41, but there are only 40 training examples"),
        (9, 1, "num_clients=9, but there are only 8 test examples"),
    ],
)
def test_impossible_shards_are_refused(clients, per_client, says):
    train, test = np.repeat(np.arange(4), 10), np.repeat(np.arange(4), 2)
    with pytest.raises(InputError, match=says):
        shard_rows(train, test, clients, per_client)


def test_a_client_without_test_examples_is_refused_in_the_end():
    # Two shards of class 1, one of its examples in the test set: whoever gets the other shard has none.
    train, test = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    with pytest.raises(InputError, match="use fewer clients"):
        shard_rows(train, test, 4, 1)


def test_a_class_without_training_examples_is_refused():
    with pytest.raises(InputError, match="class 7 has test examples but no training examples"):
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


# ---- Dirichlet


@given(
    labels_strategy, labels_strategy, st.integers(1, 8), st.floats(0.05, 1e4), st.integers(0, 2**31)
)
def test_dirichlet_partitions(train, test, num_clients, alpha, seed):
    try:
        rows, test_rows = dirichlet_rows(train, test, num_clients, alpha, seed)
    except InputError as error:
        assert "use a larger alpha or fewer clients" in str(error)
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
    with pytest.raises(InputError, match=f"alpha={alpha}: give a value above 0"):
        dirichlet_rows(np.zeros(10, int), np.zeros(10, int), 2, alpha)


def test_an_alpha_that_leaves_clients_empty_is_refused_in_the_end():
    with pytest.raises(InputError, match=r"alpha=0.001 with num_clients=20"):
        dirichlet_rows(np.zeros(100, int), np.zeros(100, int), 20, 0.001)


# ---- identically distributed, natural


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
    with pytest.raises(
        InputError, match=r"test examples but no training examples: 1, 2, 3, 4, 5 and 2 more"
    ):
        natural_rows(np.array([0]), np.arange(8))


# ---- whole data sets


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


def test_natural_needs_a_client_column():
    with pytest.raises(InputError, match="does not say who holds"):
        partition.natural(dataset([0, 1], [0, 1], 2))
    toy = dataset(
        [0, 1, 0], [1, 0], 2, held_by=np.array(["x", "y", "x"]), test_by=np.array(["y", "x"])
    )
    assert partition.natural(toy).sizes.tolist() == [2, 1]


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
        with pytest.raises(InputError, match="needs class labels"):
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


# ---- groups


def grouped(images=200, classes=5, known=3, novel=2, seed=0) -> Dataset:
    """Every image once in each group; x tells group and image."""
    labels = np.random.default_rng(seed).permutation(np.arange(images) % classes)
    count = known + novel
    group, original = np.arange(count).repeat(images), np.tile(np.arange(images), count)
    x = np.stack([group, original], axis=1).astype(np.uint8)
    train = Examples(x, np.tile(labels, count), group=group, original=original)
    names = tuple(f"kind{g}" for g in range(count))
    return Dataset(
        "toy", train, Examples(x[:0], labels[:0]), classes, groups=names, num_novel=novel
    )


def held(share, k):
    x, y = share.examples(k)
    return set(x[:, 0].tolist()), set(x[:, 1].tolist()), y


@pytest.mark.parametrize("split", ["image", "group"])
def test_groups_hold_one_kind_each_and_cover_it(split):
    toy = grouped()
    clients, novel = partition.groups(toy, 12, 10, 5, seed=3, split=split)
    assert len(clients) == 12 and len(novel) == 10 and novel.ids.tolist() == list(range(12, 22))
    assert (
        clients.names[:5] == ("kind0 0", "kind0 1", "kind0 2", "kind0 3", "kind1 0")
        and novel.names[-1] == "kind4 4"
    )
    for who, kinds, each in ((clients, (0, 1, 2), 4), (novel, (3, 4), 5)):
        for k in range(len(who)):
            for share in (who.train, who.test):
                assert held(share, k)[0] == {kinds[k // each]}
            # shards: test classes are among the training ones
            assert set(held(who.test, k)[2].tolist()) <= set(held(who.train, k)[2].tolist())
        rows = torch.cat([who.train.rows, who.test.rows])
        assert len(rows) == len(rows.unique()) == 200 * len(kinds)
        if who is clients:  # else five clients share the four test images of a class
            assert (who.test.sizes == 20 // each).all() and (who.train.sizes == 180 // each).all()
    # a tenth of every class
    for g in range(3):
        tested = np.concatenate([held(clients.test, k)[2].numpy() for k in range(4 * g, 4 * g + 4)])
        assert (np.bincount(tested) == 4).all()


def leaked(clients, novel) -> int:
    """Test images that some client trains on, in any group."""
    trained = set().union(*(held(clients.train, k)[1] for k in range(len(clients))))
    return sum(
        len(held(who.test, k)[1] & trained) for who in (clients, novel) for k in range(len(who))
    )


def test_no_test_image_is_trained_on_under_another_corruption():
    clients, novel = partition.groups(grouped(), 12, 10, 5)
    assert leaked(clients, novel) == 0
    assert leaked(*partition.groups(grouped(), 12, 10, 5, split="group")) > 50  # as the paper


def test_a_class_may_be_left_out_of_groups():
    chosen = Settings(num_clients=12, holdout_clients=10, shards_per_client=4, unseen="2")
    clients, novel = make_clients(chosen, grouped())
    for part in (clients, novel):
        held = part.train.y[part.train.rows]
        assert not (held == 2).any() and set(held.tolist()) == {0, 1, 3, 4}


def test_groups_are_reproducible_and_seeds_differ():
    def rows(seed):
        clients, novel = partition.groups(grouped(), 12, 10, 5, seed)
        return [t.tolist() for who in (clients, novel) for t in (who.train.rows, who.test.rows)]

    assert rows(1) == rows(1)
    assert all(a != b for a, b in zip(rows(1), rows(2), strict=True))
    clients, novel = partition.groups(grouped(), 12, 0, 5, 1)
    assert novel is None and clients.train.rows.tolist() == rows(1)[0]
    # the groups' class matrices differ
    firsts = [
        np.bincount(held(clients.train, k)[2].numpy(), minlength=5).tolist() for k in (0, 4, 8)
    ]
    assert len({str(one) for one in firsts}) > 1


def test_groups_are_scaled_by_the_images_that_are_trained_on():
    clients, novel = partition.groups(grouped(), 12, 10, 5)
    x = clients.train.x[clients.train.rows].double()
    assert clients.scaling.mean.double() == pytest.approx(x.mean(0), rel=1e-6)
    assert (novel.scaling.mean == clients.scaling.mean).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 10}, "num_clients=10, but there are 3 groups"),
        ({"novel_clients": 3}, "holdout_clients=3, but there are 2 groups"),
        ({"split": "none"}, "group_split='none'"),
    ],
)
def test_groups_refuse_what_does_not_divide(arguments, message):
    with pytest.raises(InputError, match=message):
        partition.groups(
            grouped(),
            **{"num_clients": 12, "novel_clients": 10, "shards_per_client": 5} | arguments,
        )
    with pytest.raises(InputError, match="no groups"):
        partition.groups(dataset([0, 1], [0, 1], 2), 2, 0, 1)


def test_the_settings_know_the_splits():
    from fedhb.runs import settings as given

    assert given.SPLITS == partition.SPLITS


def test_clients_of_a_grouped_data_set_come_from_its_groups():
    from fedhb.runs.from_settings import make_clients
    from fedhb.runs.settings import Settings

    chosen = Settings(
        num_clients=12, holdout_clients=10, shards_per_client=5, max_examples=7, validation=0.2
    )
    clients, novel = make_clients(chosen, grouped())
    assert len(clients) == 12 and len(novel) == 10
    for who in (clients, novel):
        assert (who.train.sizes + who.validation.sizes == 7).all()
    for wrong, message in ({"partition": "iid"}, "iid"), ({"server_share": 0.1}, "server_share"):
        with pytest.raises(InputError, match=message):
            make_clients(Settings(**wrong), grouped())
