"""What the terminal shows of an experiment: bars, or a line per record where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedhb_paper.jobs import Job
from fedhb_paper.records import Key, identity

QUIET = 300.0
"""Seconds after which work that goes on says so, where there is no terminal."""


class Shown:
    """A bar for all records and one for each that is made now; or a line for each, and for what is under way now and then."""

    def __init__(self, label: str, console: Console):
        self.label, self.console = label, console
        self._bar: Progress | None = None
        self._jobs: dict[str, TaskID] = {}

    def begin(self, todo: int) -> None:
        """Show the bars; instead of those of an earlier stage, where there was one."""
        self.close()
        self.todo, self.done, self._begun = todo, 0, time.monotonic()
        self._said: dict[str, float] = {}
        if self.console.is_terminal and todo:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._all = self._bar.add_task(f"[bold]{self.label}", total=todo)

    def tell(self, job: Job, share: float, text: str) -> None:
        """Move a job's bar."""
        name = identity(job.key)
        if self._bar is None:
            if time.monotonic() - self._said.setdefault(name, time.monotonic()) >= QUIET:
                self._said[name] = time.monotonic()
                self.console.print(
                    f"{title(job.key)}: {text}", highlight=False, markup=False, soft_wrap=True
                )
        else:
            if name not in self._jobs:
                self._jobs[name] = self._bar.add_task(title(job.key), total=100)
            self._bar.update(
                self._jobs[name],
                completed=round(100 * share),
                description=f"{title(job.key)}: {text}",
            )

    def recorded(self, record: Mapping[str, Any]) -> None:
        """A line of what was found, and the time left."""
        self.done += 1
        left = (time.monotonic() - self._begun) / self.done * (self.todo - self.done)
        about = f"{self.done}/{self.todo} {title(record['key'])}: {record['seconds']:.1f} s{brief(record['result'])}"
        line = about if self._bar is not None else f"{about}; {left:.0f} s left"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._bar is not None:
            task = self._jobs.pop(identity(record["key"]), None)
            if task is not None:
                self._bar.remove_task(task)
            self._bar.update(self._all, completed=self.done)

    def close(self) -> None:
        """Take the bars away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._jobs = None, {}


def title(key: Key) -> str:
    """A key in words."""
    return ", ".join(
        f"{name} {value}" if isinstance(value, int) else str(value) for name, value in key.items()
    )


def brief(result: Mapping[str, Any]) -> str:
    """The accuracies, or the root mean squared errors, where there are some."""
    if "diverged" in result:
        return ", diverged"
    found = []
    for task in ("global", "personalised"):
        metrics = result.get(task)
        if isinstance(metrics, Mapping) and "accuracy" in metrics:
            found.append(f"{task} {100 * metrics['accuracy']:.2f} %")
        elif isinstance(metrics, Mapping) and "rmse" in metrics:
            found.append(f"{task} RMSE {metrics['rmse']:.4g}, NLL {metrics['nll']:.4g}")
    return f", {', '.join(found)}" if found else ""
