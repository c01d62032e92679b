"""The contents of a page: its words and the data of its plots."""

from __future__ import annotations

import html
import json
import re
import shutil


def data_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1)
    )


def words_of(text):
    """Return the words that a reader sees, without the plots."""
    body = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def changed(path, name, change):
    """A file of a run with something else in it than fedhb writes, as its checksums allow."""
    shutil.rmtree(path / "checkpoint", ignore_errors=True)
    if name == "rounds.jsonl":
        records = [json.loads(line) for line in (path / name).read_text().splitlines()]
        for record in records:
            change(record)
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    content = json.loads((path / name).read_text())
    content.pop("checksum", None)
    change(content)
    (path / name).write_text(json.dumps(content))
