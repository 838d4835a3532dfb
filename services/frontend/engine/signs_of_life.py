"""Signs of life between a frontend and the scheduler, on one connection. No sockets, no clock."""

from protocol.requests import EngineState, FrontendAlive
from protocol.silence import SilenceWatch, unanswered

CHECK_INTERVAL = 0.25
"""Seconds between two checks."""
DOUBT_SECONDS = 2.0
"""Seconds without a sign of life, beyond the delays of the machine, after which the scheduler is not ready. It is lost,
and another one is connected to, much later."""


class SignsOfLife:
    """The scheduler is lost if nothing arrives from it, or if nothing from this frontend arrives there.

    Args:
        limit: seconds without a message, or without the answer to a sign of life, after which the scheduler is lost.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._silence = SilenceWatch(limit, CHECK_INTERVAL)
        self._silence.heard()  # the answer to the handshake
        self._sent = self._answered = 0
        """Numbers of signs of life: the last one that was sent, and the last one that was answered."""
        self._are_exchanged = True
        """The scheduler sends signs of life. One without an incarnation does not."""

    def heard(self) -> None:
        """A message has arrived."""
        self._silence.heard()

    def on_state(self, state: EngineState) -> None:
        """The scheduler has sent its state, which answers signs of life."""
        self._are_exchanged = state.incarnation > 0
        self._answered = self._sent if state.round_trips is None else state.round_trips.number

    def next(self) -> FrontendAlive | None:
        """Return the sign of life to send now; None: the scheduler expects none. Call it every `SIGN_INTERVAL`."""
        if not self._are_exchanged:
            return None
        self._sent += 1
        return FrontendAlive(self._sent)

    @property
    def in_doubt(self) -> bool:
        """The scheduler has been silent for longer than a live one is, at the last check. It may still be there."""
        return self._are_exchanged and self._silence.exceeds(DOUBT_SECONDS)

    def loss(self, now: float) -> str | None:
        """Return why the scheduler is lost, or None. Call it every `CHECK_INTERVAL`; `now`: monotonic seconds."""
        if not self._are_exchanged:
            return None
        if self._silence.check(now) is not None:
            return "the scheduler is silent"
        if unanswered(self._sent, self._answered) > self._limit:
            return "the scheduler does not answer"
        return None
