"""Reference work, measured: fedhb beside plain PyTorch, a hand-written limit and Flower.

    W1  rounds of a small network             100 clients x 600 examples, 10 in a round,
                                              MLP 784-256-10
    W2  rounds of a convolutional network     10 clients x 500 images,
                                              MobileNet with 3.3 million parameters
    W3  the server's update                   3.3 million parameters,
                                              10 to 1,000 clients in a round
    W4  a large population                    up to 1,000,000 clients, 100 in a round

Each work is a module with a `SIZE`, `measure(size, repeats, tell) -> results` and
`tables(results)`. It runs in a process of its own, forked before anything has used a second
thread, so that no work inherits another's threads, caches or memory. Within a work, the
contenders take turns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedhb.errors import InputError
from fedhb.settings_fields import did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

WORKS = ("W1", "W2", "W3", "W4")


def check_names(names: Sequence[str]) -> list[str]:
    """Return the named works in their order; all of them where none is named."""
    for name in names:
        if name.upper() not in WORKS:
            raise InputError(
                f"unknown work {name!r}{did_you_mean(name.upper(), WORKS)}: "
                f"choose from {', '.join(WORKS)}"
            )
    chosen = {name.upper() for name in names} or set(WORKS)
    return [name for name in WORKS if name in chosen]


def run(
    names: Sequence[str] = (),
    repeats: int | None = None,
    full: bool = False,
    tell: Callable[[str, float, str], None] = lambda work, share, text: None,
) -> dict[str, Any]:
    """Measure works, one after another.

    Args:
        names: of the works; none for all.
        repeats: timed rounds of every contender; default: each work's own number.
        full: whether W2 has all of its images instead of a part, scaled.
        tell: is called with a work, the share of it that is done, and what is measured now.

    Returns:
        The content of results.json: the machine, and the results of every work by its name.
    """
    from fedhb_paper.bench import machine
    from fedhb_paper.bench.processes import apart

    chosen = check_names(names)
    if repeats is not None and repeats < 1:
        raise InputError(f"repeats={repeats}: give at least 1")
    results: dict[str, Any] = {"machine": apart(machine.describe, tell=partial(tell, "machine"))}
    for name in chosen:
        work = importlib.import_module(f"fedhb_paper.bench.{name.lower()}")
        size = work.FULL if full and name == "W2" else work.SIZE
        times = repeats or work.REPEATS
        results[name] = apart(work.measure, size, times, tell=partial(tell, name))
    return results


def tables(results: dict[str, Any]) -> list[Table]:
    """Return one table or more for every work in the results."""
    shown: list[Table] = []
    for name in WORKS:
        if name in results:
            work = importlib.import_module(f"fedhb_paper.bench.{name.lower()}")
            shown += work.tables(results[name])
    return shown
