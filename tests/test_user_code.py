"""Functions of the user's own."""

from __future__ import annotations

import sys

import pytest

from fedhb.errors import InputError
from fedhb.user_code import imported, takes


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "owned_by_me.py").write_text("def make(shape):\n    return shape\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert imported("model", "owned_by_me:make")((1, 2)) == (1, 2)
    assert sys.path == before


@pytest.mark.parametrize("name", ["nowhere:make", "json:nosuch", "json", ":make", ""])
def test_a_name_that_leads_nowhere_is_named_with_the_form_it_should_have(name):
    with pytest.raises(InputError) as caught:
        imported("model", name)
    assert repr(name) in str(caught.value) and "pkg.mod:factory" in str(caught.value)


def test_options_that_a_function_does_not_take_are_refused_before_the_call():
    def make(shape, width=3):
        raise AssertionError("it was called")

    takes("model 'm:make'", make, (1,), width=4)
    with pytest.raises(InputError, match="depth"):
        takes("model 'm:make'", make, (1,), depth=4)
