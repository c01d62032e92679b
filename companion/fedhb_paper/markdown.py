"""Tables as Markdown, for documents."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def as_markdown(table: Table) -> str:
    """Return a table for a document: its title, header and rows, and the caption below it."""
    sides = ["---:" if column.justify == "right" else "---" for column in table.columns]
    lines = []
    if table.title:
        lines += [f"**{_plain(table.title)}**".replace("\n", ", "), ""]
    lines += [_line(column.header for column in table.columns), f"| {' | '.join(sides)} |"]
    lines += [_line(row) for row in zip(*(column.cells for column in table.columns), strict=True)]
    if table.caption:
        lines += ["", _plain(table.caption)]
    return "\n".join([*lines, ""])


def _line(cells: Iterable[object]) -> str:
    texts = [_plain(cell).replace("\n", "<br>").replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(texts)} |"


def _plain(text: object) -> str:
    return Text.from_markup(str(text)).plain
