"""Simulated attacks."""

from __future__ import annotations

import numpy as np
import pytest
from builders import clients

import fedhb
from fedhb.answers.hostile import attacked, choose
from fedhb.errors import InputError


def test_who_is_hostile_is_a_matter_of_the_seed():
    assert choose(100, 0.2, 0) == choose(100, 0.2, 0) != choose(100, 0.2, 1)
    assert len(choose(100, 0.2, 0)) == 20
    with pytest.raises(InputError, match="attack='rudeness'"):
        attacked(fedhb.FedAvg(), clients(), "rudeness", 0.1, 0)
    _, spoiled = attacked(fedhb.FedAvg(), clients(), "label-flip", 0.5, 0)
    changed = [
        k
        for k in range(6)
        if not np.array_equal(*(c.train.examples(k)[1] for c in (spoiled, clients())))
    ]
    assert set(changed) <= set(choose(6, 0.5, 0)) and changed
