"""The clock that waits go by. Tests have virtual ones."""

import threading
import time


class Clock:
    """The machine's monotonic clock, seconds."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Wait until `changed`, which is held, is notified, or for so many seconds; None: for any time."""
        changed.wait(seconds)


MONOTONIC = Clock()
