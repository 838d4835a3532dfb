"""Processors and memory that this process may use, within the limits of its container."""

import os
import sys
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.25
"""Default share of free memory for the KV cache. Pages are allocated at first use."""


def cores(group: Path = CONTROL_GROUP) -> int:
    """Return the number of processors that this process may run on, at least 1. `group`: files of its limits."""
    number = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _words(group / "cpu.max") or _words(group / "cpu/cpu.cfs_quota_us", group / "cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdigit():
        number = min(number, -(-int(quota[0]) // int(quota[1])))
    return max(1, number)


def free_memory(group: Path = CONTROL_GROUP) -> int:
    """Return the bytes that can be allocated without swapping. `group`: files of this process's limits."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    # Version 2 of control groups, else version 1
    numbers, statistics, prefix = _words(group / "memory.max", group / "memory.current"), "memory.stat", ""
    if not numbers:
        numbers = _words(group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes")
        statistics, prefix = "memory/memory.stat", "total_"
    if len(numbers) == 2 and numbers[0].isdigit():
        found = dict(line.split() for line in _lines(group / statistics))
        cached = sum(int(found.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))  # given back in need
        free = min(free, int(numbers[0]) - int(numbers[1]) + cached)
    return max(0, free)


def cache_budget(configured: int) -> int:
    """Return the bytes for the KV cache: `configured`, or MEMORY_SHARE of free memory if it is 0."""
    return configured or int(free_memory() * MEMORY_SHARE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(*paths: Path) -> list[str]:
    """Return the words of the first line of each file."""
    return [word for path in paths for line in _lines(path)[:1] for word in line.split()]
