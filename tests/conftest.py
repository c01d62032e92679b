"""Settings and a fixture for all tests.

Files need not survive a power cut, so nothing waits for the disk. Property tests have no deadline,
because a busy machine is no error. Torch has one thread, as in a run: for arrays this small a
second one costs more than it gains, and a hundred times as much where another process wants the
core.
"""

import os
import signal

import pytest
import torch
from hypothesis import settings

# Started in the background or by nohup, these are ignored, here and in every process that a test
# starts and then interrupts.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

torch.set_num_threads(1)

settings.register_profile("fedhb", deadline=None)
settings.load_profile("fedhb")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
