"""Records: finished work, a JSON line each, appended and kept for ever.

A record is {"key", "result", "settings", "seconds", "commit", "versions", "command"}, and {"of"} where another table lent it. Its
`settings` are everything that the result depends on, resolved. It is stale where these are no longer the present ones; then the
work is done again. A setting that did not exist when the record was made makes it stale only if it is not at its default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
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
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
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


def changed(record: Mapping[str, Any], now: Mapping[str, Any], default: Callable[[str], Any]) -> list[str]:
    """The settings by which a record is stale."""
    then: Mapping[str, Any] = record.get("settings", {})
    plain = json.loads(json.dumps(now))  # as a record keeps it: tuples are lists
    found = [name for name, value in then.items() if name not in plain or plain[name] != value]
    return found + [name for name, value in plain.items() if name not in then and default(name) != value]


def star(records: Iterable[Mapping[str, Any]]) -> str:
    """The mark of numbers by settings that have changed since."""
    return "*" if any(record.get("stale") for record in records) else ""


def current(
    records: Iterable[Mapping[str, Any]], wanted: Iterable[tuple[Key, Mapping[str, Any]]], default: Callable[[str], Any]
) -> dict[str, dict[str, Any]]:
    """For each wanted (key, present settings) that has a record, by the key's identity: the newest valid one, else the newest,
    with `stale`: the settings that have changed."""
    now = {identity(key): settings for key, settings in wanted}
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        name = identity(record["key"])
        if name in now:
            stale = changed(record, now[name], default)
            if not stale or name not in found or found[name]["stale"]:
                found[name] = {**record, "stale": stale}
    return found
