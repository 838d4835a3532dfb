"""Processors and memory that this process may use, within the limits of its container."""

import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.25
"""Default share of free memory for the KV cache. Pages are allocated at first use."""


def cores() -> int:
    """Return the number of processors that this process may run on, at least 1."""
    number = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        number = min(number, -(-int(quota[0]) // int(quota[1])))
    return max(1, number)


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _words(_CGROUP / "memory.max"), _words(_CGROUP / "memory.current")
    if limit and used and limit[0].isdigit():
        statistics = dict(line.split() for line in _lines(_CGROUP / "memory.stat"))
        cached = sum(int(statistics.get(name, 0)) for name in ("active_file", "inactive_file"))  # given back in need
        free = min(free, int(limit[0]) - int(used[0]) + cached)
    return max(0, free)


def cache_budget(configured: int) -> int:
    """Return the bytes for the KV cache: `configured`, or MEMORY_SHARE of free memory if it is 0."""
    return configured or int(free_memory() * MEMORY_SHARE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []
