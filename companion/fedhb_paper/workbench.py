"""Runs what is not recorded yet. Finished work is a record; unfinished training goes on from its checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedhb import data
from fedhb.errors import InputError
from fedhb.runs.fit import versions
from fedhb_paper import cells, records
from fedhb_paper.experiments import KINDS, Experiment, load, names
from fedhb_paper.jobs import Job, perform
from fedhb_paper.records import Key, identity
from fedhb_paper.scale import parse

UNFINISHED = ".unfinished"
"""The folder, beside the records, of checkpoints; each is removed when its record is written."""


class Watcher(Protocol):
    """Told how it goes."""

    def begin(self, todo: int) -> None:
        """So many records are to be made."""
        ...

    def tell(self, job: Job, share: float, text: str) -> None:
        """A job goes on."""
        ...

    def recorded(self, record: Mapping[str, Any]) -> None:
        """One more record."""
        ...


@dataclass(frozen=True)
class Standing:
    """Where an experiment stands: its keys, their present settings, and the records that there are (newest valid, else stale)."""

    keys: Sequence[Key]
    settings: Mapping[str, Mapping[str, Any]]
    found: Mapping[str, dict[str, Any]]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records, in the order of the keys; `stale` says by which settings."""
        return [self.found[identity(key)] for key in self.keys if identity(key) in self.found]

    @property
    def missing(self) -> list[Key]:
        """The keys without a valid record."""
        return [
            key
            for key in self.keys
            if identity(key) not in self.found or self.found[identity(key)]["stale"]
        ]

    @property
    def stale(self) -> list[dict[str, Any]]:
        """The records that stand in for missing ones."""
        return [record for record in self.records if record["stale"]]


def standing(experiment: Experiment, keys: Sequence[Key]) -> Standing:
    """Where it stands."""
    now = {identity(key): experiment.resolved(key) for key in keys}
    kept = records.read(experiment.path / "records.jsonl")
    effective = (
        cells.effective
        if hasattr(experiment.kind, "resolved")
        else lambda settings, names: settings
    )
    return Standing(
        keys, now, records.current(kept, [(key, now[identity(key)]) for key in keys], effective)
    )


def lacking(settings: Sequence[Mapping[str, Any]], remedies: bool = True) -> dict[str, str]:
    """The data sets that these settings need and that are not here, each with what to do about it (or where that is told)."""
    here = {status.name: status for status in data.status()}
    found = {
        str(one["dataset"]): "there is no such file from here"
        for one in settings
        if one.get("data") == ""
    }
    named = [one["dataset"] for one in settings if "dataset" in one and "data" not in one]
    for name in dict.fromkeys([*named, *(one["clean"] for one in settings if "clean" in one)]):
        if name not in here:
            found[name] = "it is not a data set of fedhb yet"
        elif not here[name].present:
            found[name] = here[name].remedy if remedies else "see `fedhb data`"
    return found


def complete(
    experiment: Experiment,
    keys: Sequence[Key],
    processes: int,
    watcher: Watcher,
    command: Callable[[Key], str] | None = None,
) -> Standing:
    """Run what has no valid record, here or in another table; where it stands then.

    `command` is told in a record: what makes it again.
    """
    for record in lent(experiment, standing(experiment, keys)):
        records.append(experiment.path / "records.jsonl", record)
    now = standing(experiment, keys)
    missing = now.missing
    absent = lacking([now.settings[identity(key)] for key in missing])
    if absent:
        name, remedy = next(iter(absent.items()))
        raise InputError(
            f"{experiment.name} needs the data set {name}: {remedy}; or leave out the cells with it"
        )
    about = {"commit": commit(), "versions": versions()}
    jobs = []
    for key in missing:
        digest = hashlib.sha256(
            (identity(key) + identity(now.settings[identity(key)])).encode()
        ).hexdigest()[:16]
        jobs.append(
            Job(
                experiment.kind.__name__,
                experiment.settings,
                key,
                experiment.path / UNFINISHED / digest,
            )
        )
    watcher.begin(len(jobs))
    for job, (result, seconds) in perform(jobs, processes, watcher.tell):
        spent = result.get("seconds", {})
        if spent.keys() == {
            "train",
            "evaluate",
        }:  # a run that was stopped in between has taken more than its last process
            seconds = max(seconds, sum(spent.values()))
        record = {
            "key": dict(job.key),
            "result": result,
            "settings": now.settings[identity(job.key)],
            "seconds": round(seconds, 3),
            **about,
            "command": command(job.key) if command else paper_command(experiment.name, job.key),
        }
        records.append(experiment.path / "records.jsonl", record)
        shutil.rmtree(job.folder, ignore_errors=True)
        watcher.recorded(record)
    with contextlib.suppress(OSError):  # it is not empty where other work has been begun
        (experiment.path / UNFINISHED).rmdir()
    return standing(experiment, keys)


def lent(experiment: Experiment, now: Standing) -> list[dict[str, Any]]:
    """The records that other tables have of what is missing here: the same settings give the same result.

    They keep the command that made them, and say whose they were (`of`).
    """
    others: list[tuple[str, dict[str, Any]]] = []
    if experiment.kind.__name__ == KINDS["table"] and now.missing:
        for name in names(experiment.path.parent):
            with contextlib.suppress(
                InputError
            ):  # a mistake in another table's settings is not this one's
                if (
                    name != experiment.name
                    and load(experiment.path.parent, name).settings.get("kind") == "table"
                ):
                    others += [
                        (name, record)
                        for record in records.read(experiment.path.parent / name / "records.jsonl")
                    ]
    found = []
    for key in now.missing:
        for name, record in reversed(others):  # the newest
            if "result" in record and not records.changed(
                record, now.settings[identity(key)], cells.effective
            ):
                found.append({**record, "key": dict(key), "of": record.get("of", name)})
                break
    return found


def paper_command(name: str, key: Key) -> str:
    """The command that makes this record again."""
    cell, scale = parse(str(key.get("cell", "")))
    parts = {part: key[part] for part in ("cell", "variant", "seed") if part in key}
    parts |= ({"cell": cell} if "cell" in parts else {}) | scale.changes
    options = {"variant": "algorithms", "seed": "seeds"}
    words = [
        word
        for part, value in parts.items()
        for word in (f"--{options.get(part, part)}", f"{value}")
    ]
    return shlex.join(["fedhb", "paper", name, *words])


def commit() -> str | None:
    """The commit of this code, with a + where it has been changed since; None outside a repository."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=30
        ).stdout

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # else it is installed inside somebody else's repository
        return git("rev-parse", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--", ".").strip() else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None
