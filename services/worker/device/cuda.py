"""A GPU through torch: a compute stream, a copy stream, and pinned memory.

Uploads run on the compute stream, so kernels behind them see their data.

Downloads run on the copy stream. It waits for the compute stream's work so far, copies into pinned memory, and records
an event; the thread that publishes sleeps until the event (blocking synchronisation), and the compute stream goes on
meanwhile. The sources are kept until then: torch's allocator would give their memory to a later kernel of the compute
stream. The pinned memory is kept by the result's arrays, and used again when these are dropped.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import I32
from services.worker.device.device_times import DeviceTime, StreamTimes
from services.worker.device.interface import ComputeDevice, DeviceMemory, DeviceMirror, HostCopy
from services.worker.device.pinned_memory import upload_together


class CopyEvent(Protocol):
    """Passes when everything enqueued before it has finished; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait without spinning."""


def arriving(event: CopyEvent, copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> HostCopy:
    """Return a copy that has arrived when an event has passed.

    Args:
        copies: on the host; the result's arrays are views of them.
        sources: on the device, kept until the copy has run.
    """
    kept = [*sources]

    def arrived() -> tuple[NDArray[Any], ...]:
        event.synchronize()
        kept.clear()
        return tuple(copy.numpy() for copy in copies)

    return arrived


def downloaded(tensors: Sequence[torch.Tensor]) -> HostCopy:
    """Copy tensors into pinned memory, on the current stream."""
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    event = torch.cuda.Event(blocking=True)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event.record()
    return arriving(event, copies, tensors)


class UploadedMirror(DeviceMirror):
    """Uploads changed rows."""

    def __init__(self, device: ComputeDevice, array: NDArray[Any]) -> None:
        self._device, self._array = device, array
        self.tensor = torch.from_numpy(array.copy()).to(device.where)

    def update(self, *rows: I32 | Sequence[int]) -> None:
        if any(map(len, rows)):
            changed = np.unique(np.concatenate([np.asarray(each, np.int64) for each in rows]))
            index, values = self._device.upload(changed, self._array[changed])
            self._device.launch(lambda: self.tensor.index_copy_(0, index, values))


class CudaDevice(ComputeDevice):
    is_host = False

    def __init__(self) -> None:
        self.where = torch.device("cuda", 0)
        torch.cuda.set_device(self.where)
        self._compute, self._copies = torch.cuda.Stream(self.where), torch.cuda.Stream(self.where)
        self._times = StreamTimes()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait for the copies of weights, which used the default stream, and work on the compute stream."""
        torch.cuda.set_device(self.where)
        torch.cuda.synchronize(self.where)
        try:
            with torch.cuda.stream(self._compute):
                yield
        finally:
            # torch frees the epoch's memory for the default stream at once, also if kernels of this one still write it.
            with suppress(RuntimeError):  # a device that has failed has reported it with its step
                torch.cuda.synchronize(self.where)

    # -- copies --------------------------------------------------------------------------------------------------

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return upload_together(columns, lambda staged: staged.to(self.where, non_blocking=True))

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        self._copies.wait_stream(self._compute)
        with torch.cuda.stream(self._copies):
            return downloaded(tensors)

    def mirror(self, array: NDArray[Any]) -> DeviceMirror:
        return UploadedMirror(self, array)

    # -- time and memory -----------------------------------------------------------------------------------------

    def now(self) -> DeviceTime:
        return self._times.now(self._compute)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.where)
        unused = torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
        return DeviceMemory(total, free + unused)

    def free(self) -> None:
        gc.collect()  # errors refer to the steps that raised them
        torch.cuda.empty_cache()
