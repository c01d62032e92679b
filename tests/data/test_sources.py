"""The data sets that have names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedhb import data
from fedhb.data import locate
from fedhb.errors import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder and search path for every test."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(locate, "cache_folder", lambda: folder)
    monkeypatch.delenv("FEDHB_DATA", raising=False)
    return folder


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="--data own"):
        data.load("own.npz")
    with pytest.raises(InputError, match=r"'minst'.*digits, mnist"):
        data.load("minst")


def test_every_name_has_a_source_with_hashes():
    assert set(locate.SOURCES) == set(data.NAMES) - {"digits"}
    for source in locate.SOURCES.values():
        for item in source.downloads:
            assert len(item.md5) == 32 and item.url.startswith("http")


def test_importing_is_light():
    code = "import sys, fedhb.data; print([m for m in ('sklearn', 'pooch', 'requests') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
