"""Silence of a peer, without a clock of its own: messages that do not arrive, and signs of life without an answer."""

SIGN_INTERVAL = 1.0
"""Seconds between two signs of life, except heartbeats."""
MAX_PAUSE = 1.0
"""Seconds that count at most between two checks. In a longer pause this process itself did not run, and what arrived
meanwhile may not be read yet."""
DELAY_FACTOR = 2.0
"""Multiple of the longest delay that was lately observed by which a peer's sign of life may be late."""
DELAY_HALF_LIFE = 30.0
"""Seconds after which an observed delay counts half."""


class SilenceWatch:
    """Counts the seconds since the scheduler was last heard in which this process ran.

    It begins to count at the first sign of life, the answer to the handshake.

    It also measures the delays of a busy machine: how late this process's own checks are, and how late the peer's signs
    of life arrive. `exceeds` allows for them, so that a short limit raises no false alarm.
    """

    def __init__(self, limit: float, max_pause: float = MAX_PAUSE) -> None:
        """
        Args:
            limit: seconds of silence after which the scheduler is lost.
            max_pause: seconds that count at most between two checks; at most the interval between them, if `exceeds` is
                used.
        """
        self._limit = limit
        self._max_pause = max_pause
        self._silence: float | None = None
        self._heard = False
        self._checked: float | None = None
        self.delay = 0.0
        """Longest delay that was lately observed, of this process or of the peer, seconds. It fades."""

    @property
    def silence(self) -> float:
        """Seconds since the peer was last heard, at the last check."""
        return self._silence or 0.0

    def heard(self) -> None:
        """A message has arrived."""
        self._heard = True

    def check(self, now: float) -> float | None:
        """Return the seconds of silence if they exceed the limit. Call it regularly, after reading."""
        pause = now - self._checked if self._checked is not None else 0.0
        self._checked = now
        self.delay = max(self.delay * 0.5 ** (pause / DELAY_HALF_LIFE), pause - self._max_pause)
        if self._heard:
            self.delay = max(self.delay, self.silence - SIGN_INTERVAL)
            self._silence, self._heard = 0.0, False
        elif self._silence is not None:
            self._silence += min(pause, self._max_pause)
        return self._silence if self._silence is not None and self._silence > self._limit else None

    def exceeds(self, seconds: float) -> bool:
        """Return whether the silence exceeds `seconds` by more than the delays of this machine explain."""
        return self.silence > seconds + DELAY_FACTOR * self.delay


def unanswered(sent: int, answered: int) -> float:
    """Return the seconds that a sign of life has waited for its answer, at least. Signs are numbered from 1.

    It counts signs, so the time in which this process does not run is not counted.
    """
    return max(0, sent - answered - 1) * SIGN_INTERVAL
