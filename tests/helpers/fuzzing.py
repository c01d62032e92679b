"""Changed bytes, and the bounds of time and memory within which a reader refuses them."""

from __future__ import annotations

import inspect
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_share import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedhb.errors import InputError

FULL, LEAST = 100_000, 500


LIMIT = 2**22
"""Bytes that a file may declare here (the readers' own bounds are larger, and lowered for these
tests).
"""


ROOM = 2**25
"""Bytes that a process may take beside what it has: a reader needs a few times the size of the
file, or of what that declares.
"""


BATCH = 50
"""Cases of one seed: hypothesis takes longer to draw an example than a reader to read it."""


def many(case: Callable[..., None]) -> Callable[..., None]:
    """Run `case(path, rng, ...)` for every seed of so many; `path` is a file or folder of its own."""
    signature = inspect.signature(case)
    own = [name for name in signature.parameters if name not in ("path", "rng")]

    def test(tmp_path_factory: Any, seed: int, **fixtures: Any) -> None:
        path = tmp_path_factory.getbasetemp() / f"fuzzed-{case.__name__}"
        for k in range(BATCH):
            try:
                case(path, random.Random(f"{seed} {k}"), **fixtures)
            except Exception as error:
                error.add_note(f"case {k} of seed {seed}")
                raise

    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY)
        for n in ("tmp_path_factory", "seed", *own)
    ]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = case.__name__
    test.__doc__ = case.__doc__
    count = -(-cases(FULL, LEAST) // BATCH)
    how = settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return how(given(seed=st.integers(0, 2**63))(test))


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    )


def only_input_errors(read: Callable[[], Any]) -> Any:
    """The result, or None where the reader refused."""
    try:
        return read()
    except InputError as error:
        assert str(error) and "\n\n" not in str(error)
        return None


NUMBERS = [0, 1, 2, 7, 8, 255, 256, 0x7FFF, 0xFFFF, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]


PIECES = [struct.pack(order, number) for number in NUMBERS for order in (">I", "<I")]
PIECES += [
    b"\x00" * 64,
    b"\xff" * 64,
    b"(" * 200,
    b"[" * 200,
    b"-1",
    b"1e999",
    b"nan",
    b"\\x00",
    b"'",
    b'"',
    b"\n",
    b"{",
    b"}",
    b",",
]


def changed(sound: bytes, rng: random.Random) -> bytes:
    """The sound file with up to four places overwritten, filled, removed, cut or doubled; or
    nonsense.
    """
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(300))
    content = bytearray(sound)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        # the front, where headers are, as often as everything else
        place = rng.randrange(1 + (min(200, len(content)) if rng.random() < 0.5 else len(content)))
        piece = rng.choice(PIECES) if rng.random() < 0.5 else rng.randbytes(rng.randrange(9))
        how = rng.randrange(5)
        if how == 0:
            content[place : place + len(piece)] = piece
        elif how == 1:
            content[place:place] = piece
        elif how == 2:
            del content[place : place + len(piece)]
        elif how == 3:
            del content[place:]
        else:
            content[place:place] = content[place : place + 500]
    return bytes(content)
