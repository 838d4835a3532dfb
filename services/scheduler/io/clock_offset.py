"""Offset of a peer's monotonic clock from ours, measured on the connection.

Each exchange of a `Ping` and its `Pong` gives an estimate whose error is at most half its round trip. Of the last
exchanges the one with the shortest round trip counts (NTP's clock filter, RFC 5905 section 10). On one machine all
processes share the clock, and the offset is within microseconds of zero.
"""

from collections import deque

WINDOW = 16
"""Exchanges that count. One exchange a second keeps the error of drifting clocks below a millisecond."""


class ClockOffset:
    def __init__(self) -> None:
        self._exchanges: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(round trip, offset), seconds"""

    def add(self, sent: float, received_there: float, sent_there: float, received: float) -> None:
        """One exchange, in order of time: seconds on our clock, twice on the peer's, and on ours again."""
        round_trip = (received - sent) - (sent_there - received_there)
        offset = ((received_there - sent) + (sent_there - received)) / 2
        self._exchanges.append((max(0.0, round_trip), offset))

    @property
    def seconds(self) -> float:
        """Seconds to subtract from the peer's clock to get ours; 0.0 before the first exchange."""
        return min(self._exchanges)[1] if self._exchanges else 0.0
