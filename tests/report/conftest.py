"""A comparison and its page, made once."""

from __future__ import annotations

import finished
import pytest

from fedhb.report.page import write


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return finished.several(tmp_path_factory.mktemp("compared") / "c")


@pytest.fixture(scope="module")
def page(compared, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "page.html"
    write([compared], out)
    return out.read_text()
