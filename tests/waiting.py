"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

import psutil

PATIENCE = 120.0
"""Seconds after which a condition that does not hold is a failure."""
SHORTEST, LONGEST = 0.01, 0.1
"""Seconds between two looks."""


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Look at the condition until it holds, more seldom the longer it takes: a look may be a request to a server."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < PATIENCE, f"not true in time: {what}"
        time.sleep(min(max(waited / 10, SHORTEST), LONGEST))
