"""Progress bars on a terminal, one row for each piece of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class ProgressBars:
    """Rows of a label, a bar, how much is done, a note and the time left, which go away at the end.

    Nothing is shown where the console is not a terminal: `visible` says so.
    """

    def __init__(self, console: Console):
        self.visible = console.is_terminal
        self._console = console
        self._progress: Progress | None = None
        self._rows: dict[str, TaskID] = {}

    def show(
        self, row: str, done: float, total: float | None, label: str | None = None, note: str = ""
    ) -> None:
        """Show a row, or what has changed in it.

        Args:
            row: the name of the row.
            done: how much of it is done,
            total: of how much; None where this is not known yet.
            label: the text before the bar [the name of the row].
            note: the text behind it.
        """
        if not self.visible:
            return
        if self._progress is None:
            self._progress = _progress(self._console)
            self._progress.start()
        if row not in self._rows:
            self._rows[row] = self._progress.add_task(row, total=total, note=note)
        self._progress.update(
            self._rows[row],
            completed=done,
            total=total,
            description=row if label is None else label,
            note=note,
        )

    def remove(self, row: str) -> None:
        """Take one row away, if it is shown."""
        if self._progress is not None and row in self._rows:
            self._progress.remove_task(self._rows.pop(row))

    def close(self) -> None:
        """Take all rows away. The next one that is shown begins anew."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._rows = None, {}


def _progress(console: Console) -> Progress:
    from rich.progress import (  # here: `import fedhb` does not wait for it
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def download_bars() -> Progress:
    """Return bars of bytes and their speed on the error stream, for downloads; they stay there."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
