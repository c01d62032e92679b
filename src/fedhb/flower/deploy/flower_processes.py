"""Starts and stops Flower's processes.

Flower's processes start others (an executor, an app per message) that leave their group. All of
them carry a mark in their environment, by which `Processes.stop` finds those that this object
started, and no others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedhb.errors import InputError, Stopped

MARK = "FEDHB_DEPLOYMENT"
GRACE = 5.0
"""Seconds that processes have to end by themselves."""

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
"""The settings of Flower's processes: no telemetry, and no waiting where none is needed."""


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a command: a request, and a terminal that is closed (not on Windows)."""


def end_in_order() -> None:
    """Raise `SystemExit` once when this process is ended or its terminal is closed.

    Then it stops what it started. A closed terminal sends two signals, by the shell and by the
    kernel; the second must not interrupt the stopping. A signal that is ignored already, as under
    nohup, stays ignored.
    """

    def end(number: int, frame: object) -> None:
        for kind in ENDING:
            signal.signal(kind, signal.SIG_IGN)
        sys.exit(128 + number)

    for kind in ENDING:
        if signal.getsignal(kind) is not signal.SIG_IGN:
            signal.signal(kind, end)


class Processes:
    """Started processes by name, each with a log file."""

    def __init__(self, logs: Path):
        self.logs, self.mark = logs, secrets.token_hex(16)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def environment(self, home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a Flower process's environment: its home, and this Python's commands first."""
        commands = str(Path(sys.executable).parent)
        path = f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"
        return {
            **os.environ,
            **SETTINGS,
            "PATH": path,
            "FLWR_HOME": str(home),
            MARK: self.mark,
            **(more or {}),
        }

    def start(
        self, name: str, command: Sequence[str], home: Path, more: Mapping[str, str] | None = None
    ) -> None:
        """Start a process that stays; its output goes to LOGS/NAME.log."""
        home.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [self.command(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(home, more),
                start_new_session=True,
            )

    def call(self, command: Sequence[str], home: Path, timeout: float = 120.0) -> str:
        """Run a process to its end; return its output, or raise an error."""
        try:
            done = subprocess.run(
                [self.command(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self.environment(home),
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Stopped(f"{' '.join(command)} did not end within {timeout:g} s") from None
        text = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            raise Stopped(f"{' '.join(command)} ended with code {done.returncode}:\n{text[-2000:]}")
        return text

    @staticmethod
    def command(name: str) -> str:
        """Return the path of Flower's command beside this Python."""
        path = Path(sys.executable).parent / name
        if not path.exists():
            raise InputError(
                f"{name} is not installed beside {sys.executable}: pip install 'fedhb[flower]'"
            )
        return str(path)

    def ended(self) -> dict[str, int]:
        """Return the processes that have ended, with their exit codes."""
        return {
            name: code
            for name, process in self.running.items()
            if (code := process.poll()) is not None
        }

    def log(self, name: str, count: int = 2000) -> str:
        """Return the end of a process's output."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace")[-count:] if path.exists() else ""

    def kill(self, name: str) -> None:
        """End a process at once, with everything it started, as a power cut would."""
        process = self.running.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            _signal(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything that was started: by a request first, then by force."""
        for process in self.running.values():
            if process.poll() is None:
                _signal(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process in self.running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = {}
        for kind in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + GRACE
            while (left := marked(self.mark)) and time.monotonic() < end:
                for pid in left:
                    _signal(pid, kind)
                time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the other live processes whose environment has the mark (Linux; none elsewhere)."""
    pids, needle = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if needle in variables and int(folder.name) != os.getpid():
            pids.append(int(folder.name))
    return pids


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
        except (OSError, IndexError, ValueError):
            continue
    pids, waiting = [], [pid]
    while waiting:
        more = children.get(waiting.pop(), [])
        pids += more
        waiting += more
    return pids


def free_port() -> int:
    """Return a port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def _signal(pid: int, kind: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, kind)
