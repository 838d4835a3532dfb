"""A FAKE asynchronous device: a thread of its own does its work in order, late or early.

A gate holds the work until the test opens it, so a test controls what has happened.
"""

import queue
import threading
from collections.abc import Callable

from services.worker.backends.clock import MONOTONIC, Clock
from services.worker.backends.sim.device.simulated import Inputs, no_inputs

PATIENCE = 60.0


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
    """A `SimDevice` whose work is done by a thread, while its stream `compute` is open."""

    def __init__(self) -> None:
        self.clock: Clock = MONOTONIC
        self.compute = FakeStream("fake-compute")
        self.log: list[tuple[str, int]] = []
        """("launch", n) of the host and ("complete", n) of the device; n counts launches from 0."""
        self._launched = 0

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

    def close(self) -> None:
        self.compute.close()
