"""The numbers of short runs are what they were: `python tests/golden/record.py` makes them anew
where they are meant to change.

Bits depend on processor, cores and versions of torch, so the comparison is to 1e-5 of each array's
length.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from cases import cases
from record import digest, recorded

CASES = cases()


def test_every_case_is_recorded():
    assert recorded().keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_what_they_were(tmp_path, case):
    expected = recorded()[case]
    found = {key: digest(value) for key, value in CASES[case](tmp_path).items()}
    assert found.keys() == expected.keys()
    for key, (size, norm, *entries) in expected.items():
        assert found[key][0] == size, key
        scale = max(norm, 1e-3) / max(np.sqrt(size), 1.0)  # a typical entry
        assert found[key][1] == pytest.approx(norm, rel=1e-5, abs=1e-8), key
        assert found[key][2:] == pytest.approx(entries, rel=1e-5, abs=1e-5 * max(scale, 1e-3)), key
