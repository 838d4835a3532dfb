"""A VIRTUAL clock for the simulated device."""

import threading


class VirtualClock:
    """Stands still until an event is waited for; then it jumps to the end of the event."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Nothing happens within `seconds` but what the test has done before."""
        if seconds is None:
            changed.wait()
        else:
            self.now += seconds
