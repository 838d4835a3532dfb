"""The last step records, engine events and requests, in memory of bounded size."""

import asyncio
import contextlib
import uuid
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from protocol.records import EngineEvent, RequestRecord, StepRecord, StepRecords

MAX_ROWS = 1 << 18
"""Rows of all steps that are kept; a row takes 21 bytes."""
CLOCK_WINDOW = 64
"""Batches that the offset between the scheduler's clock and this process's is estimated from."""

Recorded = StepRecord | EngineEvent | RequestRecord | int
"""An integer is a number of records that the scheduler dropped before this one."""


@dataclass(slots=True)
class RingEntry:
    """One record, and its JSON without rows once a viewer has read it."""

    sequence: int
    """1, 2, 3 ... in this ring."""
    record: Recorded
    summary: bytes | None = None


class StepRing:
    """Keeps the latest entries. A viewer that reads too slowly misses the oldest."""

    def __init__(self, capacity: int) -> None:
        self.id = uuid.uuid4().hex
        """Changes when the process starts again; sequence numbers are comparable only within one ring."""
        self.last = 0
        """Sequence number of the latest entry; 0: none."""
        self._capacity = capacity
        self._entries: deque[RingEntry] = deque()
        self._rows = 0
        self._clock_differences: deque[float] = deque(maxlen=CLOCK_WINDOW)
        self._news = asyncio.Event()
        """Set, and replaced, when viewers must look again."""

    def on_connected(self) -> None:
        """Forget the clock of the last scheduler, which may have run on another machine."""
        self._clock_differences.clear()

    def add(self, batch: StepRecords, now: float) -> None:
        """Add the entries of a message in order of time. `now`: seconds on this process's monotonic clock."""
        self._clock_differences.append(now - batch.sent)
        if batch.dropped:
            self._append(batch.dropped)
        moments: list[tuple[float, Recorded]] = [(request.times.ended, request) for request in batch.requests]
        moments += [(event.at, event) for event in batch.events]
        moments += [(step.applied, step) for step in batch.records]
        for _, record in sorted(moments, key=itemgetter(0)):  # a request that entered precedes its steps
            self._append(record)
        self.wake_viewers()

    def wake_viewers(self) -> None:
        """End each `wait`: there are new entries, or the server stops."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait for new entries, at most for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _append(self, record: Recorded) -> None:
        self.last += 1
        self._entries.append(RingEntry(self.last, record))
        self._rows += _num_rows(record)
        while len(self._entries) > self._capacity or self._rows > MAX_ROWS:
            self._rows -= _num_rows(self._entries.popleft().record)

    def scheduler_time(self, now: float) -> float | None:
        """Return the time on the scheduler's clock; None before the first message. `now`: as in `add`."""
        return now - min(self._clock_differences) if self._clock_differences else None

    def read(self, since: int, limit: int, max_rows: int = MAX_ROWS) -> tuple[list[RingEntry], int]:
        """Return at most `limit` of the oldest entries after number `since`, and how many before them are no longer
        kept. `max_rows`: maximum number of rows of their steps, unless the first has more."""
        first = self._entries[0].sequence if self._entries else self.last + 1
        begin = max(0, since + 1 - first)
        found: list[RingEntry] = []
        for entry in islice(self._entries, begin, begin + limit):
            max_rows -= _num_rows(entry.record)
            if max_rows < 0 and found:
                break
            found.append(entry)
        return found, max(0, first - since - 1)


def _num_rows(record: Recorded) -> int:
    return len(record.prefills) if isinstance(record, StepRecord) else 0
