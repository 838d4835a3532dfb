"""The simulated device: work is done at once, and counts as done at the end of its modelled time.

Work runs in order on one timeline. A step begins when it arrives, when its inputs from other devices are there, or when
the step before it ends, whichever is latest. So launching does not wait, results come late, and steps that arrive early
run back to back, as on a real accelerator (launch without waiting; docs/invariants.md). An error in a step's work is
raised when that step's event is waited for, and by every later event.

The device has no thread. The thread that launches work does it, unless earlier work waits for masks (left-out row;
docs/invariants.md), which this thread has to deliver. Then all later work is queued, and done by the thread that waits
for an event behind it: the one that sends results. What this thread does late counts from the time of the launch, so
the time that the simulation itself takes is not part of the modelled time.

Devices that work together are stages of one pipeline. They exchange times of the monotonic clock, which all processes
of a machine share: the stages of one simulated group must run on one machine.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.clock import MONOTONIC, Clock
from services.worker.backends.sim.device.interface import Inputs, no_inputs

P = ParamSpec("P")


class SimEvent:
    """A `DeviceEvent` of the simulated device."""

    __slots__ = ("_device", "began", "ended", "error", "passed")

    def __init__(self, device: "SimDevice") -> None:
        self._device = device
        self.began = self.ended = 0.0
        self.error: Exception | None = None
        self.passed = False
        """The work up to this point was done; its modelled time may not be over."""

    def reach(self) -> None:
        self._device.work_until(self)
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        self._device.work_until(self)
        clock = self._device.clock
        while (left := self.ended - clock.monotonic()) > 0:
            clock.sleep(left)
        self.reach()


class SimDevice:
    """A `Device`. One thread launches; any thread may wait for events.

    Args:
        clock: another clock, for tests.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self.clock = clock
        self._free_at = 0.0
        self._error: Exception | None = None
        self._queue: deque[Callable[[], None]] = deque()
        """Work that was not done at launch. Work in progress stays at its head, so that later work is queued too."""
        self._working = threading.Lock()
        """Held by the thread that does queued work."""

    def _do(self, work: Callable[P, None], *arguments: P.args, **keywords: P.kwargs) -> None:
        if self._queue:
            self._queue.append(partial(work, *arguments, **keywords))
        else:
            work(*arguments, **keywords)

    def work_until(self, event: SimEvent) -> None:
        """Do the queued work up to `event`."""
        if event.passed:
            return
        with self._working:
            while not event.passed:
                self._queue[0]()
                self._queue.popleft()

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        self._do(np.copyto, target, source)

    def record(self) -> SimEvent:
        event = SimEvent(self)
        self._do(self._record, event)
        return event

    def _record(self, event: SimEvent) -> None:
        event.began = self._free_at
        self._pass(event)

    def launch(self, work: Callable[[], None], seconds: float, inputs: Inputs = no_inputs) -> SimEvent:
        event, launched, at_once = SimEvent(self), self.clock.monotonic(), not self._queue
        self._do(self._launch, event, work, seconds, inputs, launched, at_once)
        return event

    def _launch(
        self,
        event: SimEvent,
        work: Callable[[], None],
        seconds: float,
        inputs: Inputs,
        launched: float,
        at_once: bool,
    ) -> None:
        """
        Args:
            launched: seconds on the clock.
            at_once: the thread that launches does the work. A host that falls behind the modelled time is seen in the
                times of such steps.
        """

        def begin_and_work() -> None:
            event.began = max(event.began, inputs())
            event.ended = event.began + seconds
            work()

        event.began = event.ended = max(launched, self._free_at)
        self._run(begin_and_work)
        self._free_at = max(event.ended, self.clock.monotonic()) if at_once else event.ended
        self._pass(event)

    def _pass(self, event: SimEvent) -> None:
        event.ended, event.error, event.passed = self._free_at, self._error, True

    def _run(self, work: Callable[[], None]) -> None:
        """Call `work`, unless earlier work has failed."""
        if self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error

    def wait_for_masks(self, taken: Callable[[], float]) -> None:
        def wait() -> None:
            self._free_at = max(self._free_at, taken())

        self._queue.append(partial(self._run, wait))

    def settle(self) -> None:
        if self._error is not None:
            raise self._error

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], SimEvent]:
        target = np.empty_like(source)
        self._do(np.copyto, target, source)
        return target, self.record()

    def close(self) -> None:
        """Do nothing: the device holds nothing that must be closed."""
