"""Memory that a round frees is what the next one needs: ask the C library to keep it.

By default glibc gives large blocks back to the system when they are freed. Their pages come back empty, one fault each, which for
vectors of millions of numbers takes longer than the sums they are for.
"""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names that mallopt(3) gives them
KEPT = 2**30


def keep() -> None:
    """Keep up to a gigabyte of freed memory in this process; nothing happens where the C library is another one."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(MMAP_THRESHOLD, KEPT) or mallopt(
            MMAP_THRESHOLD, 2**25
        ):  # older ones take no more than this
            mallopt(TRIM_THRESHOLD, KEPT)
