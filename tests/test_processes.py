"""Child processes end with their parent, and say how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedhb import processes

pytestmark = pytest.mark.skipif(not processes.can_fork(), reason="forks")


def add(pipe, number):
    import torch

    while True:
        try:
            pipe.send((number + pipe.recv(), torch.get_num_threads()))
        except (EOFError, KeyboardInterrupt):
            return


def die(pipe, code):
    os._exit(code)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_answers_on_one_thread_until_its_pipe_is_closed(method):
    child = processes.start(method, add, 3)
    child.pipe.send(4)
    assert child.pipe.recv() == (7, 1)
    child.stop(patience=30.0)
    assert child.process.exitcode == 0


@pytest.mark.parametrize(("code", "words"), [(3, "3"), (processes.NO_MEMORY, "out of memory")])
def test_a_child_that_has_died_says_how(code, words):
    child = processes.start("fork", die, code)
    with pytest.raises(EOFError):
        child.pipe.recv()
    assert words in child.ending()
    child.stop()


def test_a_child_sees_that_its_own_pipe_is_closed_while_others_are_open():
    first, second = (processes.start("fork", add, number) for number in (1, 2))
    second.stop(patience=30.0)
    first.stop(patience=30.0)
    assert (first.process.exitcode, second.process.exitcode) == (0, 0)


PARENT = """
import sys, time
from fedhb import processes
if "watch" in sys.argv:
    processes.LOOK, processes.ctypes = 0.1, None
def sleep(pipe):
    time.sleep(60)
print(processes.start("fork", sleep).process.pid, flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize("how", ["system", "watch"])
def test_a_child_ends_with_its_parent_however_that_ends(how):
    """By the system where it can, else by a thread that looks for the parent."""
    command = [sys.executable, "-c", PARENT, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < until, "the child lives on"
        time.sleep(0.05)


def test_interruptions_are_ignored_only_while_a_child_starts():
    before = signal.getsignal(signal.SIGINT)
    with processes.ignoring_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before
