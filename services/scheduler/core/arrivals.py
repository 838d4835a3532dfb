"""The order of arrival: requests that another scheduler had admitted come before new ones, the oldest of them first."""

from collections.abc import Callable, Iterable

from services.scheduler.core.request import ARRIVAL_BITS

_NEW = 1 << (ARRIVAL_BITS - 1)
"""Numbers from here on belong to new requests."""
_TIE_BITS = 15
_OLDEST = (1 << (ARRIVAL_BITS - 1 - _TIE_BITS)) - 1
"""Largest distinguished age, in milliseconds: 18 hours."""
_LEAST_SWEPT = 1024
"""Numbers that are kept before those of ended requests are swept for the first time."""


class Arrivals:
    """Numbers of arrivals, unique among open requests."""

    def __init__(self, open_numbers: Callable[[], Iterable[int]]) -> None:
        """`open_numbers`: returns the numbers of the open requests."""
        self._open_numbers = open_numbers
        self._new = 0
        self._again = 0
        self.taken: set[int] = set()
        """Numbers of requests that arrived again. Those of ended requests are swept when there may be many."""
        self._sweep_at = _LEAST_SWEPT

    def next(self, age: float) -> int:
        """Return the number of the next arrival.

        Args:
            age: seconds since the request was first submitted; 0.0: it is new.
        """
        if not age:
            self._new += 1
            return _NEW + self._new
        if len(self.taken) >= self._sweep_at:
            self.taken.intersection_update(self._open_numbers())
            self._sweep_at = max(2 * len(self.taken), _LEAST_SWEPT)
        youth = _OLDEST - int(min(1000 * age, _OLDEST))
        number = (youth << _TIE_BITS) + (self._again & ((1 << _TIE_BITS) - 1))
        self._again += 1
        while number in self.taken:
            number += 1
        self.taken.add(number)
        return number
