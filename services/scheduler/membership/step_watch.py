"""The time that steps take, and the time after which the workers count as hung."""

from collections import deque

FACTOR = 10
"""A step may take this many times the longest of the recent steps."""
RECENT = 256
"""Number of steps that count as recent."""


class StepWatch:
    def __init__(self, least: float) -> None:
        """`least`: seconds that any step may take."""
        self._least = least
        self._dispatched: deque[tuple[int, float]] = deque()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last_end = 0.0

    def on_dispatch(self, step_id: int, now: float) -> None:
        self._dispatched.append((step_id, now))

    def on_result(self, step_id: int, now: float) -> None:
        while self._dispatched and self._dispatched[0][0] <= step_id:
            _, began = self._dispatched.popleft()
            self._recent.append(now - max(began, self._last_end))
            self._last_end = now

    def reset(self) -> None:
        """No step is in flight any more."""
        self._dispatched.clear()

    def overdue(self, now: float) -> tuple[int, float] | None:
        """Return the step that takes too long and its seconds so far, or None.

        A step's time runs from its dispatch or from the end of the step before it, whichever is later.
        """
        if not self._dispatched:
            return None
        step_id, began = self._dispatched[0]
        limit = max(self._least, FACTOR * max(self._recent, default=0.0))
        took = now - max(began, self._last_end)
        return (step_id, took) if took > limit else None
