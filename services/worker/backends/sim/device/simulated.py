"""The simulated device: work is done at once, and counts as done at the end of its modelled time.

Work runs in order on one timeline. A step begins when it arrives, when its inputs from other devices are there, or when
the step before it ends, whichever is latest. So launching does not wait, results come late, and steps that arrive early
run back to back, as on a real accelerator (launch without waiting; docs/invariants.md). An error in a step's work is
raised when that step's event is waited for, and by every later event.

The device has no thread. The thread that launches work does it, unless earlier work waits for masks (left-out row;
docs/invariants.md), which this thread has to deliver. Then all later work is queued, and done by the thread that waits
for an event behind it: the one that sends results. While the modelled time of such an event passes, it does further
work that waits for nobody. What it does late counts from the time of the launch, so the time that the simulation itself
takes is not part of the modelled time.

Devices that work together are stages of one pipeline. They exchange times of the monotonic clock, which all processes
of a machine share: the stages of one simulated group must run on one machine.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from services.worker.backends.clock import MONOTONIC, Clock

Inputs = Callable[[], float]
"""Waits for inputs from other ranks, and returns when they arrived: monotonic seconds."""


def no_inputs() -> float:
    return 0.0


class SimEvent:
    """A point on the device's timeline.

    Times are seconds of the monotonic clock, valid after `synchronize` or `reach`, and for later work on the device.
    """

    __slots__ = ("_device", "began", "ended", "error", "passed")

    def __init__(self, device: "SimDevice") -> None:
        self._device = device
        self.began = self.ended = 0.0
        self.error: Exception | None = None
        self.passed = False
        """The work up to this point was done; its modelled time may not be over."""

    def reach(self) -> None:
        """Wait until all work up to this point is done, although its modelled time may not be over.

        Raises: the error of any work up to this point.
        """
        self._device.work_until(self)
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        """Wait, without spinning, until the device has reached this point.

        Raises: the error of any work up to this point.
        """
        device = self._device
        device.work_until(self)
        while (left := self.ended - device.clock.monotonic()) > 0:
            if not device.work_ahead():
                device.clock.sleep(left)
        self.reach()


class _Wait(partial[None]):
    """Queued work that waits for masks or for other ranks."""


class SimDevice:
    """A device that executes in order. No call waits for masks. One thread launches; any thread may wait for events.

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

    def work_until(self, event: SimEvent) -> None:
        """Do the queued work up to `event`."""
        if event.passed:
            return
        with self._working:
            while not event.passed:
                self._work()

    def work_ahead(self) -> bool:
        """Do one piece of queued work that waits for nobody. Return False if there is none."""
        with self._working:
            if not self._queue or isinstance(self._queue[0], _Wait):
                return False
            self._work()
            return True

    def _work(self) -> None:
        self._queue[0]()
        self._queue.popleft()

    def launch(self, work: Callable[[], None], seconds: float, inputs: Inputs = no_inputs) -> SimEvent:
        """Run `work` on the device, for `seconds` of its time that begin when `inputs` have arrived or later."""
        event, launched = SimEvent(self), self.clock.monotonic()
        if self._queue:
            queued: type[partial[None]] = partial if inputs is no_inputs else _Wait
            self._queue.append(queued(self._launch, event, work, seconds, inputs, launched, False))
        else:
            self._launch(event, work, seconds, inputs, launched, True)
        return event

    def _launch(
        self, event: SimEvent, work: Callable[[], None], seconds: float, inputs: Inputs, launched: float, at_once: bool
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
        event.ended, event.error, event.passed = self._free_at, self._error, True

    def _run(self, work: Callable[[], None]) -> None:
        """Call `work`, unless earlier work has failed."""
        if self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error

    def wait_for_masks(self, taken: Callable[[], float]) -> None:
        """Let all later work wait until `taken` returns: when masks arrived, monotonic seconds. It is called on another
        thread than this one, which delivers the masks."""

        def wait() -> None:
            self._free_at = max(self._free_at, taken())

        self._queue.append(_Wait(self._run, wait))

    @property
    def is_idle(self) -> bool:
        """Return whether all work was done without an error."""
        return not self._queue and self._error is None

    def settle(self) -> None:
        """Raises: the error of the work that was done so far."""
        if self._error is not None:
            raise self._error
