"""Progress bars: rows on a terminal, nothing elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from fedhb.progress_bars import ProgressBars


def test_rows_show_how_much_is_done_and_go_away():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = ProgressBars(console)
    for _ in range(2):  # they can be shown again after they have been closed
        bars.show("a", 0, None)
        bars.show("a", 1, 3, label="the first", note="loss 0.5")
        bars.show("b", 2, 4)
        bars.remove("b")
        bars.remove("b")
        bars.close()
        bars.close()
    shown = console.file.getvalue()
    assert bars.visible and "the first" in shown and "1/3" in shown and "loss 0.5" in shown


def test_nothing_is_shown_without_a_terminal():
    console = Console(file=io.StringIO())
    bars = ProgressBars(console)
    bars.show("a", 1, 3)
    bars.remove("a")
    bars.close()
    assert not bars.visible and console.file.getvalue() == ""
