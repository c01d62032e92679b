"""A data set as it comes from files."""

from __future__ import annotations

import numpy as np

from fedhb.data.dataset import Examples


def test_chosen_examples_keep_all_that_is_known_of_them():
    count = np.arange(5)
    examples = Examples(10 * count, count, client=count + 1, group=count + 2, original=count + 3)
    some = examples.take(np.array([3, 0]))
    assert len(examples) == 5 and len(some) == 2
    for values, first in (
        (some.x, 30),
        (some.y, 3),
        (some.client, 4),
        (some.group, 5),
        (some.original, 6),
    ):
        assert values is not None and values[0] == first
    assert Examples(count, count).take(count[:2]).client is None
