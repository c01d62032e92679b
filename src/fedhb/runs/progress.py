"""What the terminal shows of training: a Rich progress bar for a run, a live table for several, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedhb.engine.loop import Callback, State


class RoundProgress(Callback):
    """A callback with round, loss, accuracy (of the clients on their own training data) and the time left."""

    def __init__(self, label: str, console: Console | None = None, note: Callable[[], str] = str):
        self.label, self.note = label, note
        self.console = console or Console(stderr=True)
        self._bar: Progress | None = None

    def on_start(self, done: int, rounds: int, spent: float = 0.0) -> None:
        """Show the bar, or the first line; training began `spent` seconds ago."""
        self._begun, self._done, self._rounds = time.monotonic() - spent, done, rounds
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=rounds, completed=done, status="")
        elif done:
            self.console.print(f"{self.label}: going on after round {done} of {rounds}", highlight=False)

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Move the bar, or print a line for every tenth of the rounds."""
        self.show(state.done, record)

    def show(self, done: int, record: dict[str, Any]) -> None:
        """The same for whoever has a round's record alone."""
        status = "  ".join(numbers(record)) + self.note()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)
        elif done == self._rounds or done % max(1, self._rounds // 10) == 0:
            spent = time.monotonic() - self._begun
            left = spent / (done - self._done) * (self._rounds - done)
            self.console.print(f"{self.label}: round {done}/{self._rounds}  {status}  {left:.0f} s left", highlight=False)

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round: so many of the clients are personalised."""
        if self._bar is not None:
            self._bar.update(self._task, total=clients, completed=done, status="clients evaluated")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def numbers(record: Mapping[str, Any]) -> list[str]:
    """A round's loss and score; a private run tells neither, a regression has no score."""
    return [f"{key} {record[key]:.3f}" for key in ("loss", "score") if record[key] is not None]


class RunTable:
    """A live table of the runs of a comparison: those that are done, the one under way, how many wait."""

    def __init__(self, labels: Sequence[str], console: Console):
        self.labels, self.console = list(labels), console
        self._rows: dict[str, list[str]] = {}
        self._begun: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._table)

    def __enter__(self) -> RunTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def callback(self, label: str) -> TableRow:
        """Who tells of one run."""
        return TableRow(self, label)

    def show(self, label: str, *cells: str) -> None:
        """A run's cells: state, round, loss, score."""
        self._begun.setdefault(label, time.monotonic())
        self._rows[label] = list(cells)

    def finish(self, label: str, result: Mapping[str, Any]) -> None:
        """A run is done: its main metrics."""
        tasks = [task for task in ("global", "personalised") if result.get(task)]
        self._rows[label] = ["done", *(f"{task} {next(iter(result[task].values())):.4f}" for task in tasks)]
        self._spent[label] = time.monotonic() - self._begun.get(label, time.monotonic())

    def _table(self) -> Table:
        table = Table("run", "state", "", "", "seconds", box=None, pad_edge=False)
        shown = [label for label in self.labels if label in self._rows]
        room = max(3, self.console.size.height - 4)
        for label in shown[-room:]:
            cells = [*self._rows[label], "", "", ""][:3]
            if label in self._spent:
                table.add_row(label, f"[green]{cells[0]}[/green]", *cells[1:], f"{self._spent[label]:.0f}")
            else:
                table.add_row(f"[bold]{label}[/bold]", *cells, f"{time.monotonic() - self._begun[label]:.0f}")
        waiting = len(self.labels) - len(shown)
        if waiting:
            table.add_row(f"[dim]{waiting} more to run[/dim]")
        return table


class TableRow(Callback):
    """The callback that moves one run's row."""

    def __init__(self, table: RunTable, label: str):
        self.table, self.label = table, label

    def on_start(self, done: int, rounds: int) -> None:
        """It begins."""
        self.rounds = rounds
        self.table.show(self.label, f"round {done}/{rounds}")

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """One more round."""
        self.table.show(self.label, f"round {state.done}/{self.rounds}", *numbers(record))

    def evaluating(self, done: int, clients: int) -> None:
        """After the last round."""
        self.table.show(self.label, "evaluating", f"{done} of {clients} clients")
