"""Progress on the terminal: bars for a run or jobs, a table for a comparison; lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedhb.engine.loop import Callback, State
from fedhb.progress_bars import ProgressBars
from fedhb.runs.records import Key, identity

if TYPE_CHECKING:
    from fedhb.runs.jobs import Job, Tell

QUIET = 300.0
"""Seconds after which a job that goes on says so, where there is no terminal."""


class RoundProgress(Callback):
    """Shows the round, the loss and score on the clients' training data, and the time left."""

    def __init__(self, label: str, console: Console | None = None, note: Callable[[], str] = str):
        self.label, self.note = label, note
        self.console = console or Console(stderr=True)
        self._bars = ProgressBars(self.console)

    def on_start(self, done: int, rounds: int, spent: float = 0.0) -> None:
        """Show the bar, or the first line; training started `spent` seconds ago."""
        self._started, self._done, self._rounds = time.monotonic() - spent, done, rounds
        if self._bars.visible:
            self._bars.show(f"[bold]{self.label}", done, rounds)
        elif done:
            self.console.print(
                f"{self.label}: going on after round {done} of {rounds}", highlight=False
            )

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Move the bar, or print a line for every tenth of the rounds."""
        self.show(record["round"], record)

    def show(self, done: int, record: dict[str, Any]) -> None:
        """Move the bar, given a round's record alone."""
        status = "  ".join(numbers(record)) + self.note()
        if self._bars.visible:
            self._bars.show(f"[bold]{self.label}", done, self._rounds, note=status)
        elif done == self._rounds or done % max(1, self._rounds // 10) == 0:
            spent = time.monotonic() - self._started
            left = spent / (done - self._done) * (self._rounds - done)
            self.console.print(
                f"{self.label}: round {done}/{self._rounds}  {status}  {left:.0f} s left",
                highlight=False,
            )

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round: show how many of the clients are evaluated."""
        self._bars.show(f"[bold]{self.label}", done, clients, note="clients evaluated")

    def close(self) -> None:
        """Take the bar away."""
        self._bars.close()


def numbers(record: Mapping[str, Any]) -> list[str]:
    """Return a round's loss and score: a private run has neither, a regression no score."""
    return [f"{key} {record[key]:.3f}" for key in ("loss", "score") if record[key] is not None]


class RunTable:
    """A live table of the runs of a comparison: those done, the current one, how many wait."""

    def __init__(self, labels: Sequence[str], console: Console):
        self.labels, self.console = list(labels), console
        self._rows: dict[str, list[str]] = {}
        self._started: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._live = Live(
            console=console, transient=True, refresh_per_second=8, get_renderable=self._table
        )

    def __enter__(self) -> RunTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def callback(self, label: str) -> TableRow:
        """Return the callback that moves the row of a run."""
        return TableRow(self, label)

    def show(self, label: str, *cells: str) -> None:
        """Show these cells of a run: state, round, loss, score."""
        self._started.setdefault(label, time.monotonic())
        self._rows[label] = list(cells)

    def finish(self, label: str, result: Mapping[str, Any]) -> None:
        """Show the main metrics of a run that is done."""
        tasks = [task for task in ("global", "personalised") if result.get(task)]
        metrics = [f"{task} {next(iter(result[task].values())):.4f}" for task in tasks]
        self._rows[label] = ["done", *metrics]
        self._spent[label] = time.monotonic() - self._started.get(label, time.monotonic())

    def _table(self) -> Table:
        table = Table("run", "state", "", "", "seconds", box=None, pad_edge=False)
        shown = [label for label in self.labels if label in self._rows]
        room = max(3, self.console.size.height - 4)
        for label in shown[-room:]:
            cells = [*self._rows[label], "", "", ""][:3]
            if label in self._spent:
                spent = f"{self._spent[label]:.0f}"
                table.add_row(label, f"[green]{cells[0]}[/green]", *cells[1:], spent)
            else:
                spent = f"{time.monotonic() - self._started[label]:.0f}"
                table.add_row(f"[bold]{label}[/bold]", *cells, spent)
        waiting = len(self.labels) - len(shown)
        if waiting:
            table.add_row(f"[dim]{waiting} more to run[/dim]")
        return table


class TableRow(Callback):
    """The callback that moves the row of a run."""

    def __init__(self, table: RunTable, label: str):
        self.table, self.label = table, label

    def on_start(self, done: int, rounds: int) -> None:
        """The run starts."""
        self.rounds = rounds
        self.table.show(self.label, f"round {done}/{rounds}")

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """A round is done."""
        self.table.show(self.label, f"round {record['round']}/{self.rounds}", *numbers(record))

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round: clients are evaluated."""
        self.table.show(self.label, "evaluating", f"{done} of {clients} clients")


class TellRounds(Callback):
    """The callback that tells of every round of a job; training is the share `until` of it."""

    def __init__(self, tell: Tell, until: float = 1.0):
        self.tell, self.until = tell, until

    def on_start(self, done: int, rounds: int) -> None:
        """Tell where training begins."""
        self.rounds = rounds
        self._say(done)

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Tell that one more round is done."""
        self._say(record["round"])

    def _say(self, done: int) -> None:
        text = f"round {done}/{self.rounds}" if done < self.rounds else "evaluating"
        self.tell(self.until * done / self.rounds, text)

    def evaluating(self, done: int, clients: int) -> None:
        """Tell how many clients are evaluated after the last round."""
        self.tell(self.until + (1.0 - self.until) * done / clients, f"client {done}/{clients}")


class JobProgress:
    """A bar for all jobs and one for each that is at work.

    Without a terminal: a line for each job that is done, and now and then one for those at work.
    """

    def __init__(self, label: str, console: Console):
        self.label, self.console = label, console
        self._bars = ProgressBars(console)

    def begin(self, todo: int) -> None:
        """Show the bars of so many jobs, instead of those of an earlier stage."""
        self.close()
        self.todo, self.done, self._begun = todo, 0, time.monotonic()
        self._said: dict[str, float] = {}
        self._show_all()

    def _show_all(self) -> None:
        if self.todo:
            self._bars.show(f"[bold]{self.label}", self.done, self.todo)

    def tell(self, job: Job, share: float, text: str) -> None:
        """Move a job's bar."""
        name = identity(job.key)
        if self._bars.visible:
            self._bars.show(name, round(100 * share), 100, label=f"{title(job.key)}: {text}")
        elif time.monotonic() - self._said.setdefault(name, time.monotonic()) >= QUIET:
            self._said[name] = time.monotonic()
            self._print(f"{title(job.key)}: {text}")

    def recorded(self, record: Mapping[str, Any]) -> None:
        """Print a line of a job's result, and the time left."""
        self.done += 1
        left = (time.monotonic() - self._begun) / self.done * (self.todo - self.done)
        line = f"{self.done}/{self.todo} {title(record['key'])}: {record['seconds']:.1f} s"
        line += brief(record["result"])
        self._print(line if self._bars.visible else f"{line}; {left:.0f} s left")
        self._bars.remove(identity(record["key"]))
        self._show_all()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bars away."""
        self._bars.close()


def title(key: Key) -> str:
    """Return a key in words."""
    return ", ".join(
        f"{name} {value}" if isinstance(value, int) else str(value) for name, value in key.items()
    )


def brief(result: Mapping[str, Any]) -> str:
    """Return the accuracies of a result, or its root mean squared errors, where it has some."""
    if "diverged" in result:
        return ", diverged"
    parts = []
    for task in ("global", "personalised"):
        metrics = result.get(task)
        if isinstance(metrics, Mapping) and "accuracy" in metrics:
            parts.append(f"{task} {100 * metrics['accuracy']:.2f} %")
        elif isinstance(metrics, Mapping) and "rmse" in metrics:
            parts.append(f"{task} RMSE {metrics['rmse']:.4g}, NLL {metrics['nll']:.4g}")
    return f", {', '.join(parts)}" if parts else ""
