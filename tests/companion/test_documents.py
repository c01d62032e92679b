"""The tables of the documents are those of the records."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    """docs/tables.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("document_tables", ROOT / "docs/tables.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


documents = load()


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_what_is_recorded(path):
    text = path.read_text()
    assert documents.PLACE.search(text), "it has no table of records"
    assert documents.written(text) == text, "run `python docs/tables.py`"


def test_a_number_that_is_not_in_the_records_is_found():
    text = (ROOT / "README.md").read_text()
    match = documents.PLACE.search(text)
    digit = next(k for k in range(match.start(3), match.end(3)) if text[k] == "8")
    wrong = text[:digit] + "9" + text[digit + 1 :]
    assert documents.written(wrong) == text


def test_tables_side_by_side():
    one = documents.Shown("a: where", [["", "x"], ["r", "1"], ["s", "2"]])
    two = documents.Shown("b: where", [["", "x", "y"], ["r", "3", "4"], ["s", "5", "6"]])
    joined = documents.beside([one, two])
    assert joined.title == "where" and joined.rows == [
        ["", "a: x", "b: x", "y"],
        ["r", "1", "3", "4"],
        ["s", "2", "5", "6"],
    ]
    with pytest.raises(ValueError, match="rows"):
        documents.beside([one, documents.Shown("c: where", [["", "x"], ["t", "1"], ["s", "2"]])])
