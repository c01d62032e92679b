"""A run's folder belongs to one process at a time."""

from __future__ import annotations

from typing import Any
import errno
import pytest
import re
from fedhb.errors import InputError
from fedhb.runs import folder
from fedhb.runs.folder import RunFolder
from stopped_runs import fit
from stopped_runs import fork
from stopped_runs import stopped


ROUNDS = 6


def test_a_folder_in_use_is_refused(tmp_path):
    out = tmp_path / "run"
    inside, go_on = fork.Event(), fork.Event()
    process = fork.Process(target=fit, args=(out, lambda done: (inside.set(), go_on.wait(30))))
    process.start()
    try:
        assert inside.wait(30)
        with pytest.raises(InputError, match=f"{re.escape(str(out))}.*process"):
            fit(out)
        with pytest.raises(InputError, match="run.*resume"):
            fit(out, resume=False)
    finally:
        go_on.set()
        process.join()
    assert process.exitcode == 0
    assert fit(out).state.done == ROUNDS  # free again, and finished


def test_a_file_system_without_locks_is_no_other_process(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with RunFolder(tmp_path / "run").locked():
        assert (tmp_path / "run").is_dir()


def test_the_lock_is_given_back_whatever_happens(tmp_path):
    out = stopped(tmp_path / "run", at=2)
    for _ in range(2):
        with pytest.raises(InputError, match="resume"):
            fit(out, lr=0.07)
    one = RunFolder(out)
    one.lock()
    with pytest.raises(InputError, match="process"):
        RunFolder(out).lock()
    one.unlock()
    with RunFolder(out).locked():
        pass
