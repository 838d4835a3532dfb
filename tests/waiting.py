"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which a condition that does not hold is a failure."""


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not true in time: {what}"
        time.sleep(0.01)
