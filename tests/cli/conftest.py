"""The command line as a fixture."""

from __future__ import annotations

import sys

import pytest

from fedhb.cli import main


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    return command
