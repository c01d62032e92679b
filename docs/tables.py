"""The tables of the documents, made from the records of experiments/.

A document names the command whose tables it shows, and has them between two comments:

    <!-- fedhb paper all_mnist --dataset mnist -->
    ...
    <!-- end -->

Beside the command's own options, `--titles A,B` shows only tables whose titles begin so, and
`--beside` those of the same rows as one. `python docs/tables.py` writes all anew;
tests/companion/test_documents.py tells where a document and the records differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fedhb.cli.main import app
from fedhb_paper import paper_command

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/reproduction.md"]
PLACE = re.compile(r"(<!-- fedhb (paper [^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A table in Markdown: its title, and its rows as lists of texts, the head first."""

    title: str
    rows: list[list[str]]

    def __str__(self) -> str:
        line = [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(
            [f"**{self.title}**", "", line[0], "|" + "---|" * len(self.rows[0]), *line[1:], ""]
        )


def tables(words: list[str]) -> list[Shown]:
    """What this command prints of the records."""
    printed = io.StringIO()
    quiet = contextlib.redirect_stderr(io.StringIO())
    with (
        contextlib.redirect_stdout(printed),
        quiet,
        mock.patch.object(paper_command, "draw"),
    ):  # no figures
        app(
            [*words, "--show", "--markdown", "--folder", str(ROOT / "experiments")],
            standalone_mode=False,
        )
    found: list[Shown] = []
    for text in printed.getvalue().splitlines():
        if text.startswith("**"):
            found.append(Shown(text.strip("*"), []))
        elif text.startswith("|") and not text.startswith("| ---"):
            found[-1].rows.append([cell.strip() for cell in text.strip().strip("|").split(" | ")])
    return found


def beside(several: list[Shown]) -> Shown:
    """Tables of the same rows as one: the head of each one's first column says which it is."""
    rows = [list(row[:1]) for row in several[0].rows]
    for one in several:
        what, _, where = one.title.partition(": ")
        if [row[:1] for row in one.rows] != [row[:1] for row in rows]:
            raise ValueError(f"{one.title}: its rows are others than those of {several[0].title}")
        for row, more in zip(rows, one.rows, strict=True):
            row += [f"{what}: {more[1]}", *more[2:]] if row is rows[0] else more[1:]
    return Shown(where, rows)


def written(text: str) -> str:
    """A document with its tables as the records have them."""

    def replaced(match: re.Match[str]) -> str:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--titles", default="")
        parser.add_argument("--beside", action="store_true")
        options, words = parser.parse_known_args(shlex.split(match[2]))
        titles = tuple(title.strip() for title in options.titles.split(",") if title.strip())
        found = [table for table in tables(words) if not titles or table.title.startswith(titles)]
        return (
            match[1]
            + "\n"
            + "\n".join(map(str, [beside(found)] if options.beside else found))
            + "\n"
            + match[4]
        )

    return PLACE.sub(replaced, text)


if __name__ == "__main__":
    for path in DOCUMENTS:
        before = path.read_text(encoding="utf-8")
        after = written(before)
        path.write_text(after, encoding="utf-8")
        sys.stdout.write(
            f"{path.relative_to(ROOT)}: {'changed' if after != before else 'as it was'}\n"
        )
