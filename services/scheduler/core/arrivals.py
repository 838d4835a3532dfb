"""The order of arrival: requests that another scheduler had admitted come before new ones, the oldest of them first."""

from services.scheduler.core.request import ARRIVAL_BITS

_NEW = 1 << (ARRIVAL_BITS - 1)
"""Numbers from here on belong to new requests."""
_TIE_BITS = 15
_OLDEST = (1 << (ARRIVAL_BITS - 1 - _TIE_BITS)) - 1
"""Largest distinguished age, in milliseconds: 18 hours."""


class Arrivals:
    """Numbers of arrivals, each of them unique."""

    def __init__(self) -> None:
        self._new = 0
        self._again = 0
        self._taken: set[int] = set()
        """Numbers of requests that arrived again."""

    def next(self, age: float) -> int:
        """Return the number of the next arrival.

        Args:
            age: seconds since the request was first submitted; 0.0: it is new.
        """
        if not age:
            self._new += 1
            return _NEW + self._new
        youth = _OLDEST - min(int(1000 * age), _OLDEST)
        number = (youth << _TIE_BITS) + (self._again & ((1 << _TIE_BITS) - 1))
        self._again += 1
        while number in self._taken:
            number += 1
        self._taken.add(number)
        return number
