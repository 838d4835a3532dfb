"""The simulated device: work is done at once, and counts as done at the end of its modelled time.

Work runs in order on one timeline. A step begins when it arrives, when its inputs from other devices are there, or when
the step before it ends, whichever is latest. So launching does not wait, results come late, and steps that arrive early
run back to back, as on a real accelerator (launch without waiting; docs/invariants.md). An error in a step's work is
raised when that step's event is waited for, and by every later event.

Devices that work together are stages of one pipeline. They exchange times of the monotonic clock, which all processes
of a machine share: the stages of one simulated group must run on one machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Clock(Protocol):
    """A clock in seconds; the module `time` is one."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class SimEvent:
    """A `DeviceEvent` of the simulated device."""

    began: float
    ended: float
    error: Exception | None
    clock: Clock

    def synchronize(self) -> None:
        while (left := self.ended - self.clock.monotonic()) > 0:
            self.clock.sleep(left)
        if self.error is not None:
            raise self.error


class SimDevice:
    """A `Device` without a thread.

    Args:
        clock: another clock, for tests.
    """

    def __init__(self, clock: Clock = time) -> None:
        self._clock = clock
        self._free_at = 0.0
        self._error: Exception | None = None

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        np.copyto(target, source)

    def record(self) -> SimEvent:
        return SimEvent(self._free_at, self._free_at, self._error, self._clock)

    def launch(self, work: Callable[[], None], seconds: float, not_before: float = 0.0) -> SimEvent:
        began = max(self._clock.monotonic(), self._free_at, not_before)
        if self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error
        self._free_at = max(began + seconds, self._clock.monotonic())
        return SimEvent(began, self._free_at, self._error, self._clock)

    def settle(self) -> None:
        if self._error is not None:
            raise self._error

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], SimEvent]:
        return source.copy(), self.record()

    def close(self) -> None:
        """Do nothing: the device holds nothing that must be closed."""
