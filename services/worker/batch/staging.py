"""Host buffers that asynchronous copies read from: the one place that knows when such a buffer may be rewritten.

The host-buffer rule (S3 (b) 6, S3-5): memory that is the source of a copy to the device may be rewritten only after
that copy has finished. A `HostRing` holds one more set of buffers than steps can be in flight, and each set carries the
event of the last copy that read it. Preparing a step is always

    inputs = ring.acquire()         # waits only if this very set is still being read
    ...write into inputs..., enqueue the copies
    ring.release(event)             # recorded after the last of these copies

so launching a step never waits for the step before it (S3-3). What is immutable, such as the bytes of a message,
needs no ring. A device that copies at once releases with `None`.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


MAX_STEPS_IN_FLIGHT = 8
"""The deepest batch queue that can be configured."""


class CopyEvent(Protocol):
    """Passes when everything enqueued before it has finished; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Waits without spinning."""


class HostRing(Generic[T]):
    """`make()` builds one set of host buffers; the sets are handed out in turn. For one thread."""

    def __init__(self, make: Callable[[], T], size: int = MAX_STEPS_IN_FLIGHT + 1) -> None:
        self._sets = [make() for _ in range(size)]
        self._events: list[CopyEvent | None] = [None] * size
        self._current = 0
        self._acquired = False

    def acquire(self) -> T:
        """The next set, free to be written.

        Raises:
            RuntimeError: the set before was never released.
        """
        if self._acquired:
            raise RuntimeError("the host buffers of the step before were never released")
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
            self._events[self._current] = None
        self._acquired = True
        return self._sets[self._current]

    def release(self, event: CopyEvent | None) -> None:
        """Ends the writing; the set comes back only after `event` has passed."""
        if not self._acquired:
            raise RuntimeError("release without acquire")
        self._acquired = False
        self._events[self._current] = event
        self._current = (self._current + 1) % len(self._sets)
