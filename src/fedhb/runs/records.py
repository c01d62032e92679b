"""Records of finished work: a JSON line each, appended to a file.

A record is {"key", "result", "settings", "seconds", "commit", "versions", "command"}. Its
`settings` are everything that the result depends on, resolved. A record is stale where they are
not the present ones; the work is then done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = Mapping[str, Any]
"""The name of a record among those of a file, such as {"cell", "variant", "seed"}."""

MISSING = object()
"""Stands for the value of a setting that a record does not have."""

FILE = "records.jsonl"
"""The name of the file, in the folder of what was run."""


def identity(key: Key) -> str:
    """Return a key as text; equal keys give equal texts."""
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, oldest first; lines that a crash cut short are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "key" in record:
            records.append(record)
    return records


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file; it is on the disk when this returns.

    A line that a crash has cut short stays a line of its own.
    """
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


Effective = Callable[[Mapping[str, Any], Iterable[str]], Mapping[str, Any]]
"""`effective(settings, names)`: the settings as they act, with values for those of the names that
they do not have."""


def changed(record: Mapping[str, Any], now: Mapping[str, Any], effective: Effective) -> list[str]:
    """Return the names of the settings by which a record is stale."""
    plain = json.loads(json.dumps(now))  # as a record keeps it: tuples are lists
    then, present = effective(record.get("settings", {}), plain), effective(plain, ())
    return [
        name
        for name in {**then, **present}
        if then.get(name, MISSING) != present.get(name, MISSING)
    ]


def current(
    records: Iterable[Mapping[str, Any]],
    wanted: Iterable[tuple[Key, Mapping[str, Any]]],
    effective: Effective,
) -> dict[str, dict[str, Any]]:
    """Return one record for each wanted key that has any, by the key's identity.

    Args:
        records: oldest first.
        wanted: pairs of a key and its present settings.
        effective: how settings act.

    Returns:
        The newest record that is valid, else the newest; with `stale`: the settings that have
        changed since it was made.
    """
    now = {identity(key): settings for key, settings in wanted}
    chosen: dict[str, dict[str, Any]] = {}
    for record in records:
        name = identity(record["key"])
        if name in now:
            stale = changed(record, now[name], effective)
            if not stale or name not in chosen or chosen[name]["stale"]:
                chosen[name] = {**record, "stale": stale}
    return chosen


@dataclass(frozen=True)
class Inventory:
    """The records that exist of some keys.

    Attributes:
        keys: the keys, in order.
        settings: the present settings of each, by its identity.
        existing: the record of each key that has one (see `current`), by its identity.
    """

    keys: Sequence[Key]
    settings: Mapping[str, Mapping[str, Any]]
    existing: Mapping[str, dict[str, Any]]

    @classmethod
    def of(
        cls, path: Path, wanted: Sequence[tuple[Key, Mapping[str, Any]]], effective: Effective
    ) -> Inventory:
        """Read a file of records, and look for the wanted keys at their present settings."""
        return cls(
            [key for key, _ in wanted],
            {identity(key): settings for key, settings in wanted},
            current(read(path), wanted, effective),
        )

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records, in the order of the keys; `stale` says by which settings."""
        names = map(identity, self.keys)
        return [self.existing[name] for name in names if name in self.existing]

    @property
    def missing(self) -> list[Key]:
        """The keys without a valid record."""
        valid = {name for name, record in self.existing.items() if not record["stale"]}
        return [key for key in self.keys if identity(key) not in valid]

    @property
    def stale(self) -> list[dict[str, Any]]:
        """The records that stand in for missing ones."""
        return [record for record in self.records if record["stale"]]
