"""Records: finished work, a JSON line each, appended.

A record is {"key", "result", "settings", "seconds", "commit", "versions", "command"}, and {"of"} where another table lent it. Its
`settings` are everything that the result depends on, resolved. It is stale where these are no longer the present ones; then the
work is done again. A setting that did not exist when the record was made makes it stale only if it is not at what there was
before it (`cells.effective`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Key = Mapping[str, Any]
MISSING = object()


def identity(key: Key) -> str:
    """A key as text, the same for equal keys."""
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first. Lines that a crash cut short are passed over."""
    records = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    ):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "key" in record:
            records.append(record)
    return records


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more record, on disk when this returns. What a crash left of a line stays a line of its own."""
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


Effective = Callable[[Mapping[str, Any], Iterable[str]], Mapping[str, Any]]
"""Settings as they act, where those of these names that they lack are at what there was before them."""


def changed(record: Mapping[str, Any], now: Mapping[str, Any], effective: Effective) -> list[str]:
    """The settings by which a record is stale."""
    plain = json.loads(json.dumps(now))  # as a record keeps it: tuples are lists
    then, present = effective(record.get("settings", {}), plain), effective(plain, ())
    return [
        name
        for name in {**then, **present}
        if then.get(name, MISSING) != present.get(name, MISSING)
    ]


def star(records: Iterable[Mapping[str, Any]]) -> str:
    """The mark of numbers by settings that have changed since."""
    return "*" if any(record.get("stale") for record in records) else ""


def on_one_grid(records: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Those whose results were taken at the same places (under this name) as a valid one: others have no mean with it."""
    grid = next(
        (
            r["result"].get(name)
            for r in (*(r for r in records if not r.get("stale")), *reversed(records))
        ),
        None,
    )
    return [r for r in records if r["result"].get(name) == grid]


def current(
    records: Iterable[Mapping[str, Any]],
    wanted: Iterable[tuple[Key, Mapping[str, Any]]],
    effective: Effective,
) -> dict[str, dict[str, Any]]:
    """For each wanted (key, present settings) that has a record, by the key's identity: the newest valid one, else the newest,
    with `stale`: the settings that have changed."""
    now = {identity(key): settings for key, settings in wanted}
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        name = identity(record["key"])
        if name in now:
            stale = changed(record, now[name], effective)
            if not stale or name not in found or found[name]["stale"]:
                found[name] = {**record, "stale": stale}
    return found
