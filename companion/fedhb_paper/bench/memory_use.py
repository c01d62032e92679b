"""The memory of processes, as the system counts it.

Linux counts a process's peak memory (VmHWM) and lets it be set back; elsewhere the numbers are
None.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path


def own_processes() -> list[int]:
    """Return the ids of this process and of the children it has started."""
    children = [child.pid for child in multiprocessing.active_children()]
    return [os.getpid(), *(pid for pid in children if pid is not None)]


def resident_bytes(processes: Iterable[int]) -> int | None:
    """Return the memory of these processes; pages that several hold count once (PSS)."""
    try:
        return sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in processes)
    except OSError:
        return None


class PeakMemory:
    """The largest rise of the memory of these processes since this was made.

    It is the sum of each one's own rise.
    """

    def __init__(self, processes: Iterable[int]):
        self._before: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for pid in processes:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # sets VmHWM back to the present
                self._before[pid] = _field(Path(f"/proc/{pid}/status"), "VmRSS")

    def rise(self) -> int | None:
        """Return the rise in bytes."""
        if not self._before:
            return None
        peaks = {pid: _field(Path(f"/proc/{pid}/status"), "VmHWM") for pid in self._before}
        return sum(max(0, peak - self._before[pid]) for pid, peak in peaks.items())


def _field(path: Path, name: str) -> int:
    """Return the value of a line `Name:  123 kB` of a file in /proc, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
