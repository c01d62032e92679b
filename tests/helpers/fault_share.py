"""How large the fault suites are: one setting, FEDHB_FAULTS, the share of the full numbers.

`make test` takes a five-hundredth, `make test-faults` more, and `make soak` all of them (1).
"""

from __future__ import annotations

import os

SHARE = float(os.environ.get("FEDHB_FAULTS", "0.002"))


def cases(full: int, least: int = 1) -> int:
    """How many of `full` cases to run: the share of them, and at least so many."""
    return min(full, max(least, round(SHARE * full)))
