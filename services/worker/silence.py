"""Silence of the scheduler, without a clock of its own. It begins to count at the first sign of life."""

PAUSE = 1.0
"""Seconds between two checks after which this process itself was stopped: what arrived meanwhile is not read yet."""


class SilenceWatch:
    def __init__(self, limit: float) -> None:
        """`limit`: seconds of silence after which the scheduler is lost."""
        self._limit = limit
        self._heard: float | None = None
        self._checked = 0.0

    def heard(self, now: float) -> None:
        self._heard = now

    def check(self, now: float) -> float | None:
        """Return the seconds of silence if they exceed the limit. Call it regularly, after reading."""
        paused, self._checked = now - self._checked > PAUSE, now
        if self._heard is None:
            return None
        if paused:
            self._heard = now
        silence = now - self._heard
        return silence if silence > self._limit else None
