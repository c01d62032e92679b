"""The machine of the measurements: what it is, and how fast it reads memory and multiplies."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedhb import __version__
from fedhb.engine.cohort import cores
from fedhb_paper.bench.processes import Tell

ARRAY_BYTES = 2**30
"""Bytes that are read to measure bandwidth: several times the cache of one process."""


def describe(tell: Tell) -> dict[str, Any]:
    """Return the `machine` of results.json, which does not name the computer or its owner."""
    count = cores()
    tell(0.0, "memory bandwidth")
    bandwidth = {
        "bandwidth_bytes_1": bandwidth_bytes(1),
        "bandwidth_bytes_all": bandwidth_bytes(count),
    }
    tell(0.7, "matrix products")
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": count,
        "caches": caches(),
        "memory_bytes": memory_bytes(),
        **bandwidth,
        "gflops_1": gflops(1),
        "gflops_all": gflops(count),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedhb": __version__,
    }


def processor() -> str:
    """Return the processor's name."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def caches() -> dict[str, str]:
    """Return the caches of the first core, where known, such as {"L2 Unified": "2048K"}."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return {f"L{_text(f / 'level')} {_text(f / 'type')}": _text(f / "size") for f in folders}


def memory_bytes() -> int | None:
    """Return the machine's memory, where it is known."""
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def bandwidth_bytes(threads: int) -> float:
    """Return the bytes per second at which a large float32 array is summed, the best of five."""
    array = torch.ones(min(ARRAY_BYTES, (memory_bytes() or ARRAY_BYTES) // 8) // 4)
    return array.numel() * 4 / best(threads, lambda: array.sum())


def gflops(threads: int, size: int = 1024) -> float:
    """Return the floating-point operations per nanosecond of a float32 matrix product."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    return 2 * size**3 / best(threads, lambda: a @ b) / 1e9


def best(threads: int, function: Callable[[], object]) -> float:
    """Return the seconds of the shortest of five runs on so many threads."""
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for _ in range(6):  # the first warms up
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return min(seconds[1:])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
