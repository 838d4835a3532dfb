"""NVIDIA GPUs of this machine, without torch."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
TIMEOUT = 10.0
"""Seconds that nvidia-smi has; a driver that hangs does not answer."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    total: int
    free: int


def gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists; none without it or without a driver."""
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [*parse(done.stdout)] if done.returncode == 0 else []


def parse(text: str) -> Iterator[Gpu]:
    """Yield the GPUs in the output of `QUERY`, which has MiB; lines without numbers are left out."""
    for line in text.splitlines():
        match line.rsplit(", ", 2):
            case [name, total, free] if total.isdigit() and free.isdigit():
                yield Gpu(name, int(total) << 20, int(free) << 20)
