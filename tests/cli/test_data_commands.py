"""`fedhb data`: what is here, and what cannot be had. tests/data/test_cifar_c.py makes a data set
with it.
"""

from __future__ import annotations

import pytest


def test_what_is_missing_is_listed_with_the_command_that_gets_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDHB_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    code, printed = run("data")
    assert code == 0 and "digits" in printed
    assert "fedhb data get mnist" in printed and "fedhb data make cifar-100-c" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["get", "minst"], ["'minst'", "mnist"]),
        (["make", "mnist"], ["'mnist'", "cifar-100-c"]),
        (["make", "cifar-100-c", "--jobs", "0"], ["--jobs"]),
    ],
)
def test_a_name_that_cannot_be_had_exits_2(run, words, says):
    code, printed = run("data", *words)
    assert code == 2 and all(word in printed for word in says)
