"""`fedhb report` and its messages."""

from __future__ import annotations

import re
import sys

import pytest

from fedhb.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere.*folder"),
        (["."], "run"),
        ([".", "--out", "no/page.html"], "folder.*no|no.*folder"),
    ],
)
def test_bad_input_is_told(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedhb", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
