"""What the terminal shows of a run: a Rich progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedhb.engine.loop import State


class RoundProgress:
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
        shown = [f"{key} {record[key]:.3f}  " for key in ("loss", "score") if record[key] is not None]
        status = "".join(shown).rstrip() + self.note()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)
        elif done == self._rounds or done % max(1, self._rounds // 10) == 0:
            spent = time.monotonic() - self._begun
            left = spent / (done - self._done) * (self._rounds - done)
            self.console.print(f"{self.label}: round {done}/{self._rounds}  {status}  {left:.0f} s left", highlight=False)

    def on_end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
