"""The scheduler's signs of life that a rank has answered, on each of its connections.

A heartbeat answers on the connection for results, a `Pong` on the one for plans. A rank reads plans between two steps
only. So while a step is in flight, its time limit takes the place of the answer.
"""

from dataclasses import dataclass

from protocol.silence import unanswered


@dataclass
class Answers:
    """Numbers of signs; each worker gets the same ones."""

    start: int = 0
    """Last sign before the epoch took effect."""
    results: int | None = None
    """Last sign that was answered by a heartbeat; None: the worker's protocol is older and has no answers."""
    plans: int = 0
    """Last sign that was answered by a `Pong`, or sent while a step was in flight."""

    def seconds_without(self, sent: int) -> float:
        """Return the seconds that a sign has waited for its answer on one of the connections, at least.

        Args:
            sent: the last sign that was sent.
        """
        if self.results is None:
            return 0.0
        return unanswered(sent, max(self.start, min(self.results, self.plans)))
