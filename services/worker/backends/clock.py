"""The clock that waits go by. Tests have virtual ones."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return the time in seconds."""
        ...

    def sleep(self, seconds: float, /) -> None: ...

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Wait until `changed`, which is held, is notified, or for so many seconds; None: for any time."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        changed.wait(seconds)


MONOTONIC = MonotonicClock()
