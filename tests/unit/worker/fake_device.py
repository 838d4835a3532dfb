"""A FAKE asynchronous device: threads of its own, late copies, and checks of the memory that copies read.

Two streams run in order: compute (copies from the host, and work) and copies to the host. A gate holds each stream
until the test opens it, so a test controls what has happened. A host buffer that changes while a copy from it is
pending, or device memory that changes while a copy to the host is pending, is a *violation*; the copy takes the changed
data, as real hardware would. An array that is copied to the host contains poison until the copy has ended.

An *amplifier* makes races visible: it delays copies and overwrites each host buffer as soon as it was copied, so that
code which reads the buffer afterwards, or instead of a copy, gets wrong data.
"""

import queue
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.clock import MONOTONIC, Clock
from services.worker.backends.sim.device.simulated import Inputs, no_inputs

PATIENCE = 60.0
POISON = -(2**31) + 77


class FakeEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()
        self.error: Exception | None = None
        self.began = self.ended = 0.0

    @property
    def passed(self) -> bool:
        return self._passed.is_set()

    def pass_(self, error: Exception | None) -> None:
        self.error = error
        self._passed.set()

    def reach(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self._passed.wait(PATIENCE), "the fake device is stuck; is a gate closed?"
        if self.error is not None:
            raise self.error


class FakeStream:
    """Runs its work in order while its gate is open. After an error it runs nothing more."""

    def __init__(self, name: str) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], FakeEvent] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> FakeEvent:
        event = FakeEvent()
        self._queue.put((work, event))
        return event

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, event = item
            self.gate.wait()
            if self._error is None:
                try:
                    work()
                except Exception as error:
                    self._error = error
            event.pass_(self._error)

    def close(self) -> None:
        self.gate.set()
        self._queue.put(None)
        self._thread.join(PATIENCE)


class FakeDevice:
    """A `Device` with the streams `compute` and `results`. `amplifier` draws the delay of each copy."""

    def __init__(self, amplifier: Random | None = None) -> None:
        self.clock: Clock = MONOTONIC
        self._amplifier = amplifier
        self.compute, self.results = FakeStream("fake-compute"), FakeStream("fake-results")
        self.violations: list[str] = []
        self.log: list[tuple[str, int]] = []
        """("launch", n) of the host and ("complete", n) of the device; n counts launches from 0."""
        self._launched = 0
        self.failing_copy: Exception | None = None
        """The error of the next copy to the host."""

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        before = source.copy()

        def copy() -> None:
            self._delay()
            if not np.array_equal(before, source):
                self.violations.append("a host buffer was rewritten while a copy from it was pending")
            np.copyto(target, source)
            if self._amplifier is not None:
                source.view(np.uint8).fill(0x9B)

        self.compute.put(copy)

    def _delay(self) -> None:
        if self._amplifier is not None and self._amplifier.random() < 0.1:
            time.sleep(self._amplifier.random() * 1e-3)

    def record(self) -> FakeEvent:
        return self.compute.put(lambda: None)

    def launch(self, work: Callable[[], None], seconds: float, inputs: Inputs = no_inputs) -> FakeEvent:
        number, self._launched = self._launched, self._launched + 1
        self.log.append(("launch", number))

        def run() -> None:
            inputs()
            work()
            self.log.append(("complete", number))

        return self.compute.put(run)

    def wait_for_masks(self, taken: Callable[[], float]) -> None:
        def wait() -> None:
            taken()

        self.compute.put(wait)

    def settle(self) -> None:
        """Errors are raised with results."""

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], FakeEvent]:
        target = np.full_like(source, POISON)
        computed = np.empty_like(source)
        failing, self.failing_copy = self.failing_copy, None

        def remember() -> None:
            computed[:] = source

        ready = self.compute.put(remember)

        def copy() -> None:
            ready.synchronize()
            if failing is not None:
                raise failing
            self._delay()
            if not np.array_equal(computed, source):
                self.violations.append("device memory was reused while a copy of it was pending")
            np.copyto(target, source)

        return target, self.results.put(copy)

    def close(self) -> None:
        self.compute.close()
        self.results.close()
