"""Asks the C library to keep freed memory, because the next round needs what this one frees.

By default glibc gives large blocks back to the system when they are freed. Their pages come back
empty, one fault each; for vectors of millions of numbers that takes longer than the sums.
"""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names that mallopt(3) gives them
BYTES_KEPT = 2**30


def keep() -> None:
    """Keep up to a gigabyte of freed memory in this process.

    With another C library than glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # older versions take at most 2**25
        if mallopt(MMAP_THRESHOLD, BYTES_KEPT) or mallopt(MMAP_THRESHOLD, 2**25):
            mallopt(TRIM_THRESHOLD, BYTES_KEPT)
