"""Requests that may be the cause of the workers' deaths (suspects, docs/invariants.md).

A request that was in flight when two groups of workers in a row were lost, without progress in between, is a suspect. A
suspect runs alone until its output has made progress. If the workers are lost while it runs alone, it is guilty.
"""

from collections.abc import Iterable

from protocol.suspects import PROGRESS, SUSPECT_AFTER
from services.scheduler.core.request import RequestKey

GUILTY = (
    f"the model workers were lost {SUSPECT_AFTER + 1} times while they computed this request, the last time alone; "
    "it is refused"
)


class Suspects:
    def __init__(self) -> None:
        self._losses: dict[RequestKey, tuple[int, int]] = {}
        """Groups that were lost in a row, and the number of tokens at the last of these losses."""
        self.active: dict[RequestKey, int] = {}
        """Suspects with their number of tokens at the last loss, in the order in which they run alone."""

    def blame(self, in_flight: Iterable[tuple[RequestKey, int]]) -> list[RequestKey]:
        """The workers were lost. Return the requests that are guilty.

        Args:
            in_flight: requests with a row in flight, with their number of tokens.
        """
        guilty = []
        for key, length in in_flight:
            losses, before = self._losses.get(key, (0, 0))
            losses = 1 if length - before > PROGRESS else losses + 1
            self._losses[key] = losses, length
            if losses >= SUSPECT_AFTER:
                self.active[key] = length
            if losses > SUSPECT_AFTER:
                guilty.append(key)
        return guilty

    def check(self, key: RequestKey, length: int) -> bool:
        """Return whether a suspect is cleared by its number of tokens; then it is a suspect no more."""
        cleared = length - self.active[key] > PROGRESS
        if cleared:
            self.forget(key)
        return cleared

    def forget(self, key: RequestKey) -> None:
        """The request has ended, or is cleared."""
        self._losses.pop(key, None)
        self.active.pop(key, None)
