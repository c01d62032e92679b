"""The command line as a fixture."""

from __future__ import annotations

import sys

import pytest

from fedhb.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command: (exit code, what it printed)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    return command
