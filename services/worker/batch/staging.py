"""Host buffers that asynchronous copies read from, and when such a buffer may be rewritten.

This is the host-buffer rule (docs/invariants.md): memory that is the source of a copy to the device may be rewritten
only after that copy has finished. A `HostRing` holds one more set of buffers than steps can be in flight, and each set
has the event of the last copy that read it. A step is always prepared in this order:

    inputs = ring.acquire()         # waits only if a copy still reads this set
    ...write into inputs..., enqueue the copies
    ring.release(event)             # recorded after the last of these copies

So a launch does not wait for the step before it (launch without waiting). Immutable memory, such as the bytes of a
message, needs no ring. A device whose copies have finished when they return releases with `None`.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


MAX_STEPS_IN_FLIGHT = 8
"""The deepest batch queue that can be configured."""


class CopyEvent(Protocol):
    """Passes when everything enqueued before it has finished; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait without spinning."""


class HostRing(Generic[T]):
    """Sets of host buffers, built by `make()` and used in turn. Not thread-safe."""

    def __init__(self, make: Callable[[], T], size: int = MAX_STEPS_IN_FLIGHT + 1) -> None:
        self._sets = [make() for _ in range(size)]
        self._events: list[CopyEvent | None] = [None] * size
        self._current = 0
        self._acquired = False

    def acquire(self) -> T:
        """Return the next set, which may be written until `release`.

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
        """End the writing. The set is used again only after `event` has passed.

        Raises:
            RuntimeError: no set was acquired.
        """
        if not self._acquired:
            raise RuntimeError("release without acquire")
        self._acquired = False
        self._events[self._current] = event
        self._current = (self._current + 1) % len(self._sets)
