"""Flower's processes are stopped, however the command ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedhb.errors import Stopped
from fedhb.flower.deploy.flower_processes import Processes, free_port, listens, marked

STARTS = """
import os, signal, sys, time
from pathlib import Path
from fedhb.flower.deploy.flower_processes import Processes, end_in_order
processes = Processes(Path(sys.argv[1]))
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
end_in_order()
class Again(Processes):
    def stop(self):
        os.kill(os.getpid(), signal.SIGHUP)
        super().stop()
processes.__class__ = Again
try:
    processes.start("x", [Path(sys.executable).name, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]))
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    time.sleep(0.2)
    print("went on", flush=True)
finally:
    processes.stop()
    print(processes.mark)
"""


@pytest.mark.parametrize(
    ("before", "kind", "code"),
    [
        ("", "SIGHUP", 129),
        ("", "SIGTERM", 143),
        ("ignored", "SIGHUP", 0),
        ("ignored", "SIGTERM", 143),
    ],
)
def test_signals_stop_what_was_started_and_do_not_break_the_stopping_off(
    tmp_path, before, kind, code
):
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path), before, kind],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout.split("\n")
    assert done.returncode == code and said[-2] and marked(said[-2]) == [], done.stderr
    assert ("went on" in said) == (code == 0)


def test_a_process_that_fails_is_told_without_a_traceback(tmp_path):
    with pytest.raises(Stopped, match="code 3"):
        Processes(tmp_path).call([Path(sys.executable).name, "-c", "raise SystemExit(3)"], tmp_path)


def test_everything_that_was_started_is_stopped_also_what_ran_away(tmp_path):
    """A process that starts another in a session of its own, and ignores polite signals: both go, a
    stranger stays.
    """
    processes = Processes(tmp_path)
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    processes.start("stubborn", [Path(sys.executable).name, "-c", script], tmp_path / "home")
    end = time.monotonic() + 20
    while len(marked(processes.mark)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    processes.stop()
    assert marked(processes.mark) == [] and stranger.poll() is None
    stranger.kill()
    assert stranger.wait() == -signal.SIGKILL


def test_ports():
    assert not listens(free_port())
