"""The ways a run can end early."""

from __future__ import annotations

import pytest

from fedhb.errors import DivergedError, InputError, Stopped, WorkersError, reason


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("lr=-1"), "lr=-1"),
        (ValueError("first\nsecond"), "first"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_the_reason_is_one_line_and_never_empty(error, line):
    assert reason(error) == line


def test_bad_input_is_a_value_error_and_a_stopped_run_is_not():
    assert issubclass(InputError, ValueError)
    for error in (DivergedError, WorkersError):
        assert issubclass(error, Stopped) and not issubclass(error, InputError)
