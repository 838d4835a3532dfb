"""Silence of a peer, without a clock of its own: messages that do not arrive, and signs of life without an answer."""

SIGN_INTERVAL = 1.0
"""Seconds between two signs of life, except heartbeats."""
MAX_PAUSE = 1.0
"""Seconds that count at most between two checks. In a longer pause this process itself did not run, and what arrived
meanwhile may not be read yet."""


class SilenceWatch:
    """Counts the seconds since the scheduler was last heard in which this process ran.

    It begins to count at the first sign of life, the answer to the handshake.
    """

    def __init__(self, limit: float) -> None:
        """`limit`: seconds of silence after which the scheduler is lost."""
        self._limit = limit
        self._silence: float | None = None
        self._heard = False
        self._checked = 0.0

    def heard(self) -> None:
        """A message has arrived."""
        self._heard = True

    def check(self, now: float) -> float | None:
        """Return the seconds of silence if they exceed the limit. Call it regularly, after reading."""
        pause, self._checked = now - self._checked, now
        if self._heard:
            self._silence, self._heard = 0.0, False
        elif self._silence is not None:
            self._silence += min(pause, MAX_PAUSE)
        return self._silence if self._silence is not None and self._silence > self._limit else None


def unanswered(sent: int, answered: int) -> float:
    """Return the seconds that a sign of life has waited for its answer, at least. Signs are numbered from 1.

    It counts signs, so the time in which this process does not run is not counted.
    """
    return max(0, sent - answered - 1) * SIGN_INTERVAL
