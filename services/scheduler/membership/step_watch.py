"""The time that steps take, and the time after which the workers count as hung.

A step's time is modelled as a constant, a part per position that it computes, and a part per position that its rows
attend to. Then a measured step bounds every other one: its time, multiplied by the ratio of their sizes. The limit is a
multiple of the least bound. The first step of a size may compile, so sizes that were not measured in this epoch have a
longer limit. The bound of a large step by a small one is coarse, because the constant part is multiplied too: it raises
the limit of a size that was not measured to a few times the configured one at most.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from protocol.codec import unpack
from protocol.columns import greatest, total
from protocol.steps import SchedulerOutput

FACTOR = 10
"""A step may take this many times the bound."""
FLOOR = 5.0
"""Seconds that any step may take, unless the limit for sizes that were not measured is lower."""
STRETCH = 5
"""A step whose number of positions was not measured may take this many times the configured limit at most."""
DECAY = 0.99
"""Weight that the longest step of a size keeps with each further step of that size: half after 69 steps."""


class StepSize(NamedTuple):
    positions: int = 1
    """Positions that the step computes."""
    attended: int = 1
    """Sum over these positions of the length of their sequence; at most twice the work of attention."""
    rows: int = 1
    longest: int = 1
    """Most positions of a row."""

    @classmethod
    def from_plan(cls, plan: SchedulerOutput) -> "StepSize":
        counts = unpack(plan.counts)
        ends, positions = unpack(plan.starts) + counts, total(counts)
        if positions == len(counts):  # every row has one position
            return cls(positions, total(ends), positions)
        return cls(positions, int(counts.astype(np.int64) @ ends), len(counts), greatest(counts, 0))

    @property
    def bucket(self) -> tuple[int, int]:
        """Powers of two."""
        return self.positions.bit_length(), self.attended.bit_length()


SMALLEST = StepSize()


class StepWatch:
    def __init__(self, first: float) -> None:
        """`first`: seconds that a step may take whose size was not measured yet."""
        self._first = first
        self._dispatched: deque[tuple[int, StepSize, float]] = deque()
        self._longest: dict[tuple[int, int], float] = {}
        """Bucket of sizes -> seconds of the longest step, which decay."""
        self._last_end = 0.0

    @property
    def in_flight(self) -> bool:
        """Return whether the result of a step is missing."""
        return bool(self._dispatched)

    def on_dispatch(self, step_id: int, size: StepSize, now: float) -> None:
        self._dispatched.append((step_id, size, now))

    def on_result(self, step_id: int, now: float) -> None:
        while self._dispatched and self._dispatched[0][0] <= step_id:
            _, size, began = self._dispatched.popleft()
            took, bucket = now - max(began, self._last_end), size.bucket
            self._longest[bucket] = max(took, DECAY * self._longest.get(bucket, 0.0))
            self._last_end = now

    def size_of(self, step_id: int) -> StepSize | None:
        """Return the size of a step in flight; None: it is not in flight."""
        return next((size for number, size, _ in self._dispatched if number == step_id), None)

    def reset(self) -> None:
        """The epoch has ended: no step is in flight, and other workers may take other times."""
        self._dispatched.clear()
        self._longest.clear()

    def limit(self, size: StepSize) -> float:
        """Return the seconds that a step of this size may take."""
        bounds = [
            seconds * max(1.0, 2 * size.positions / 2**positions, 2 * size.attended / 2**attended)
            for (positions, attended), seconds in self._longest.items()
        ]
        is_measured = any(positions == size.bucket[0] for positions, _ in self._longest)
        bound = FACTOR * min(bounds, default=0.0)
        if is_measured:
            return max(min(FLOOR, self._first), bound)
        return min(max(self._first, bound), STRETCH * self._first)

    def overdue(self, now: float) -> tuple[int, float] | None:
        """Return the step that takes too long and its seconds so far, or None.

        A step's time runs from its dispatch or from the end of the step before it, whichever is later.
        """
        if not self._dispatched:
            return None
        step_id, size, began = self._dispatched[0]
        took = now - max(began, self._last_end)
        if took <= min(FLOOR, self._first):
            return None
        return (step_id, took) if took > self.limit(size) else None
