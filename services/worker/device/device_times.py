"""Points in time of a device's work, and the times of a step, on the clock of the host."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from protocol.steps import StepTimes

DeviceTime = Callable[[], float]
"""A point in the order of the device's work: waits until the device has reached it, and returns when that was, seconds
on the monotonic clock. Called at most once, in the order of the points, unless the device is the host."""


def past(at: float) -> DeviceTime:
    """Return a point that has been reached."""
    return lambda: at


class StepClock(NamedTuple):
    """Times of a step on this rank; on a device they are known when the work has been done."""

    prepared: float
    """Seconds on the monotonic clock."""
    began: DeviceTime
    ended: DeviceTime
    """Beginning and end of the forward pass."""
    waited: float = 0.0
    """Seconds from the end of the step before until the compute thread began this one."""

    def times(self, sampled: DeviceTime) -> StepTimes:
        """Wait until the step was sampled, and return its times."""
        return StepTimes(
            prepared=self.prepared,
            forward_began=self.began(),
            forward_ended=self.ended(),
            sampled=sampled(),
            prepared_wait=self.waited,
        )


class DeviceClock:
    """Converts events to seconds on the host's clock. For one calling thread, in the order of the events.

    Durations are measured from the event before, because a device gives them as float32: over hours they would be
    rounded to milliseconds. The clocks drift apart. A device's clock that is ahead is set back, because an event that
    has happened is not in the future; one that is behind is set by the next event of an idle device.

    Args:
        clock: the host's clock, seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: torch.cuda.Event | None = None
        self._at = 0.0

    def seconds(self, event: torch.cuda.Event, known: float | None) -> float:
        """Wait for an event that follows the one before, and return when it happened.

        Args:
            known: when it was enqueued, if the device was idle then: it happened at once.
        """
        event.synchronize()
        if known is not None:
            self._at = known
        elif self._last is None:
            self._at = self._clock()
        else:
            self._at = min(self._at + self._last.elapsed_time(event) / 1e3, self._clock())
        self._last = event
        return self._at


class StreamTimes:
    """Points in time of CUDA streams whose work is enqueued by one thread."""

    def __init__(self) -> None:
        self._clock = DeviceClock(time.monotonic)

    def now(self, stream: torch.cuda.Stream) -> DeviceTime:
        """Return the point in time after everything enqueued on `stream` so far."""
        known = time.monotonic() if stream.query() else None
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return partial(self._clock.seconds, event, known)
