"""Counts of the waits of the compute thread for the device.

torch's synchronisation debug mode reports operations that wait for a stream, such as `item` or a blocking copy. It does
not report `Event.synchronize`, with which a `HostCopy` waits, so calls of that are counted here.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

SYNCHRONISED = "called a synchronizing CUDA operation"
"""Beginning of the warning for each operation that waits. The place in torch follows."""


class WaitedEvent(Protocol):
    def query(self) -> bool:
        """True when the event has passed."""
        ...

    def synchronize(self) -> None: ...


@dataclass
class CountedWaits:
    operations: int = 0
    """Operations of torch that waited, in any thread."""
    events: int = 0
    """Events that had not passed when the compute thread waited for them."""


@contextmanager
def counted_waits(event: type[WaitedEvent]) -> Iterator[CountedWaits]:
    """Count waits inside the context; the numbers are complete at its end."""
    waits, synchronize = CountedWaits(), event.synchronize

    def counted(self: WaitedEvent) -> None:
        waits.events += threading.current_thread().name == "compute" and not self.query()
        synchronize(self)

    event.synchronize = counted  # type: ignore[method-assign]  # restored below
    try:
        with _reported_operations() as caught:
            yield waits
    finally:
        event.synchronize = synchronize  # type: ignore[method-assign]
    waits.operations = sum(str(each.message).startswith(SYNCHRONISED) for each in caught)


@contextmanager
def _reported_operations() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings():  # torch says at the first change of the mode that this is a prototype
        warnings.simplefilter("ignore")
        _report("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        _report("default")


def _report(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)
