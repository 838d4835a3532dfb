"""A FAKE asynchronous device: threads of its own, copies that end late, and an eye on what they read (S3).

Two streams, each in order: compute (copies from the host and work) and copies to the host. A gate holds each stream
until the test opens it, so tests say what has happened instead of hoping for it. A host buffer that changes while a
copy from it is pending, or device memory that changes while a copy to the host is pending, is a *violation*, and the
copy takes the changed data, as real hardware would. What is copied to the host is poison until the copy has ended.

An *amplifier* of races makes copies late and overwrites each host buffer as soon as it was copied: whoever reads it
after that, or instead of a copy of his own, is not lucky any more.
"""

import queue
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def synchronize(self) -> None:
        assert self._passed.wait(PATIENCE), "the fake device is stuck; is a gate closed?"
        if self.error is not None:
            raise self.error


class Stream:
    """Runs what is put in, in order, while its gate is open. After an error nothing runs any more."""

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
    """A `Device` of the simulator. `compute` and `results` are its streams; `amplifier` draws how late a copy is."""

    def __init__(self, amplifier: Random | None = None) -> None:
        self._amplifier = amplifier
        self.compute, self.results = Stream("fake-compute"), Stream("fake-results")
        self.violations: list[str] = []
        self.log: list[tuple[str, int]] = []
        """("launch", n) by the host and ("complete", n) by the device, n counted from 0 in order of launch."""
        self._launched = 0
        self.failing_copy: Exception | None = None
        """Raised by the next copy to the host."""

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        before = source.copy()

        def copy() -> None:
            self._dawdle()
            if not np.array_equal(before, source):
                self.violations.append("a host buffer was rewritten while a copy from it was pending")
            np.copyto(target, source)
            if self._amplifier is not None:
                source.view(np.uint8).fill(0x9B)

        self.compute.put(copy)

    def _dawdle(self) -> None:
        if self._amplifier is not None and self._amplifier.random() < 0.1:
            time.sleep(self._amplifier.random() * 1e-3)

    def record(self) -> FakeEvent:
        return self.compute.put(lambda: None)

    def launch(self, work: Callable[[], None], seconds: float, not_before: float = 0.0) -> FakeEvent:
        number, self._launched = self._launched, self._launched + 1
        self.log.append(("launch", number))

        def run() -> None:
            work()
            self.log.append(("complete", number))

        return self.compute.put(run)

    def settle(self) -> None:
        self.compute.put(lambda: None).synchronize()

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], FakeEvent]:
        target = np.full_like(source, POISON)
        computed = np.empty_like(source)
        failing, self.failing_copy = self.failing_copy, None

        def note() -> None:
            computed[:] = source

        ready = self.compute.put(note)

        def copy() -> None:
            ready.synchronize()
            if failing is not None:
                raise failing
            self._dawdle()
            if not np.array_equal(computed, source):
                self.violations.append("device memory was reused while a copy of it was pending")
            np.copyto(target, source)

        return target, self.results.put(copy)

    def close(self) -> None:
        self.compute.close()
        self.results.close()
