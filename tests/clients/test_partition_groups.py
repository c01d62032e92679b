"""Clients of groups: each group holds one kind of example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from partitions import dataset, grouped

from fedhb.clients import partition
from fedhb.errors import InputError
from fedhb.runs.from_settings import make_clients
from fedhb.runs.settings import Settings


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
        ({"num_clients": 10}, "num_clients=10.*3 groups"),
        ({"novel_clients": 3}, "holdout_clients=3.*2 groups"),
        ({"split": "none"}, "group_split='none'"),
    ],
)
def test_groups_refuse_what_does_not_divide(arguments, message):
    with pytest.raises(InputError, match=message):
        partition.groups(
            grouped(),
            **{"num_clients": 12, "novel_clients": 10, "shards_per_client": 5} | arguments,
        )
    with pytest.raises(InputError, match="groups"):
        partition.groups(dataset([0, 1], [0, 1], 2), 2, 0, 1)
