"""The simulated device: work is done at once, but counts as done only at the end of its modelled time.

Everything enqueued runs in order, on one timeline: a step begins when it arrives, when what it needs from other devices
is there, or when the step before it ends, whichever is latest. So launching never waits, results come late, and steps
that arrive early run back to back, as on a real accelerator (S3). An error in a step's work shows when that step's
event is waited for, and in every later one.

Devices that work together are stages of one pipeline. They tell each other times of the monotonic clock, which all
processes of a machine share: stages of one simulated group must run on one machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Event(Protocol):
    """A point on the device's timeline.

    Times are seconds of the monotonic clock, valid after `synchronize`; on `SimDevice` at once.
    """

    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    def synchronize(self) -> None:
        """Waits, without spinning, until the device has come this far. Raises: what failed up to here."""


class Device(Protocol):
    """What the simulator asks of a device; calls return at once and their effects happen in order."""

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Host to device. `source` must not change before a later event has passed."""

    def record(self) -> Event: ...

    def launch(self, work: Callable[[], None], seconds: float, not_before: float = 0.0) -> Event:
        """Runs `work` on the device, taking `seconds` of its time from `not_before` or later on."""

    def settle(self) -> None:
        """Waits until all work so far is done, though its time may not be over. Raises: what failed up to here."""

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], Event]:
        """Device to host: an array that is valid once the event has passed; `source` must stay as it is until then."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Moment:
    """An `Event` of the simulated device."""

    began: float
    ended: float
    error: Exception | None

    def synchronize(self) -> None:
        while (left := self.ended - time.monotonic()) > 0:
            time.sleep(left)
        if self.error is not None:
            raise self.error


class SimDevice:
    """A `Device` without a thread."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._error: Exception | None = None

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        np.copyto(target, source)

    def record(self) -> Moment:
        return Moment(self._free_at, self._free_at, self._error)

    def launch(self, work: Callable[[], None], seconds: float, not_before: float = 0.0) -> Moment:
        began = max(time.monotonic(), self._free_at, not_before)
        if self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error
        self._free_at = max(began + seconds, time.monotonic())
        return Moment(began, self._free_at, self._error)

    def settle(self) -> None:
        if self._error is not None:
            raise self._error

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], Moment]:
        return source.copy(), self.record()

    def close(self) -> None:
        """Nothing is left behind."""
