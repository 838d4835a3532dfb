"""A SIMULATED device with two streams that do nothing until somebody waits: the worst order that streams allow.

Memory of the device is memory of the host here, but it contains poison until the work that writes it has run, and that
runs only when an event behind it is waited for. So code that reads a result on the host too early, or overwrites memory
that a pending copy reads, gets wrong data every time, and not only in a rare race.

Memory of the device that changes, or is freed, while a download from it is pending, is recorded as a hazard, and
poisons the data that it concerns.

Streams can also be eager: their work runs when it is enqueued, as on a device that is faster than the host. An eager
compute stream with a lazy copy stream shows whether a later step overwrites what an earlier one downloads.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from services.worker.device.cuda import UploadedMirror, arriving
from services.worker.device.device_times import DeviceTime
from services.worker.device.interface import ComputeDevice, DeviceMirror, HostCopy
from services.worker.device.pinned_memory import upload_together

POISON = -(2**31) + 77
Work = Callable[[], object]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return poison(torch.empty(shape, dtype=dtype))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(POISON if tensor.dtype in (torch.int32, torch.int64) else 0x9B)


class LazyStream:
    """Work in order, under the device's lock."""

    def __init__(self, lock: threading.RLock, eager: bool) -> None:
        self._lock, self._eager = lock, eager
        self._work: deque[Work] = deque()
        self.done = self._put = 0
        self._error: Exception | None = None

    def put(self, work: Work) -> "LazyEvent":
        with self._lock:
            self._work.append(work)
            self._put += 1
            event = LazyEvent(self, self._put)
            if self._eager:
                self.run(event.number)
        return event

    def run(self, number: int) -> None:
        """Run work up to this number. After an error nothing more is run."""
        with self._lock, torch.inference_mode():
            while self.done < number:
                work = self._work.popleft()
                self.done += 1
                try:
                    if self._error is None:
                        work()
                except Exception as error:
                    self._error = error

    def check(self) -> None:
        """Raises: the error of earlier work"""
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class LazyEvent:
    """Passed when the stream's work up to a number has run. Waiting for it runs the work."""

    stream: LazyStream
    number: int

    def query(self) -> bool:
        return self.stream.done >= self.number

    def synchronize(self) -> None:
        self.stream.run(self.number)
        self.stream.check()


class LazyDevice(ComputeDevice):
    """Both streams, and the memory between them.

    Args:
        eager: names of streams, "compute" and "copies", whose work runs at once.
        keeps: False plants a fault: the sources of downloads are not kept.
    """

    is_host = False

    def __init__(self, eager: frozenset[str] = frozenset(), keeps: bool = True) -> None:
        lock = threading.RLock()
        self._compute, self._copies = (LazyStream(lock, name in eager) for name in ("compute", "copies"))
        self._keeps = keeps
        self._running: int | None = None
        """Thread that runs work; what it calls is part of the work."""
        self.hazards: list[str] = []
        self.uploads = self.downloads = 0

    # -- work ----------------------------------------------------------------------------------------------------

    def launch(self, function: Work) -> None:
        if self._running == threading.get_ident():
            function()
        else:
            self._compute.put(lambda: self._run(function))

    def _run(self, function: Work) -> None:
        with self.immediately():
            function()

    @contextmanager
    def immediately(self) -> Iterator[None]:
        """Run what is launched inside at once."""
        before, self._running = self._running, threading.get_ident()
        try:
            yield
        finally:
            self._running = before

    def _passed(self) -> LazyEvent:
        return self._compute.put(lambda: None)

    # -- copies --------------------------------------------------------------------------------------------------

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        self.uploads += 1
        return upload_together(columns, self._copied, pinned=False)

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        whole = poison(torch.empty_like(source))
        self.launch(lambda: whole.copy_(source))
        return whole

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        self.downloads += 1
        copies = [poisoned(*each.shape, dtype=each.dtype) for each in tensors]
        sources = [weakref.ref(each) for each in tensors]
        values: list[torch.Tensor] = []
        ready = self._compute.put(lambda: values.extend(_value(source) for source in sources))

        def copy() -> None:
            ready.synchronize()
            for target, source, value in zip(copies, sources, values, strict=True):
                if _same(_value(source), value):
                    target.copy_(value)
                else:
                    self.hazards.append("memory of the device changed while a download from it was pending")

        return arriving(self._copies.put(copy), copies, tensors if self._keeps else ())

    def mirror(self, array: NDArray[Any]) -> DeviceMirror:
        return UploadedMirror(self, array)

    def now(self) -> DeviceTime:
        """Return the number of the work before."""
        event = self._passed()

        def seconds() -> float:
            event.synchronize()
            return float(event.number)

        return seconds


def _value(source: "weakref.ref[torch.Tensor]") -> torch.Tensor:
    """A copy of the tensor; poison if it was freed, as its memory has another owner."""
    tensor = source()
    return torch.full((1,), torch.nan) if tensor is None else tensor.clone()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
