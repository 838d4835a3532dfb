"""The device of a rank as the runner uses it: copies in both directions, their order, and points in time.

Rules:

- **One calling thread** enqueues: uploads, updates of mirrors, kernels, downloads. A `HostCopy`
  and a `DeviceTime` may be called by another thread.
- **Order.** Uploads and kernels run in the order of the calls. A download runs beside later kernels, after everything
  that was enqueued before it.
- **Sources.** The columns given to `upload` and `DeviceMirror.update` stay unchanged until the call returns; on the CPU
  the tensor is the column itself, so a caller that changes it changes the tensor (host-buffer rule,
  docs/invariants.md). The tensors given to `download` are not written again by any later kernel (result memory).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import I32
from services.worker.device.device_times import DeviceTime, past


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device that is apart from the host's, bytes."""

    total: int
    free: int
    """Free for all processes, with what torch has reserved and does not use."""


HostCopy = Callable[[], tuple[NDArray[Any], ...]]
"""Tensors on their way to the host: waits for the copy without spinning, and returns them. The arrays are the caller's:
no later step changes them."""


class DeviceMirror:
    """An array of the host and its copy on the device; this one is in the array's own memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.tensor = torch.from_numpy(array)
        """The copy, at an address that does not change."""

    def update(self, *rows: I32 | Sequence[int]) -> None:
        """Copy rows that the host has changed. A row may be named more than once."""


class ComputeDevice:
    """The device of one rank. This one is the host: work is complete when its call returns, and nothing is copied."""

    where = torch.device("cpu")
    """Tensors of kernels and of the runner are allocated here."""
    is_host = True
    """The host reads the device's memory directly, and work is complete when its call returns."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context for the calling thread, in which torch enqueues its work on this device. At its end, all
        work has run, so memory that it used may be freed."""
        return nullcontext()

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Return the columns on the device, by one copy of all of them. uint64 becomes int64 with the same bits."""
        return tuple(torch.from_numpy(_signed(column)) for column in columns)

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        """Copy tensors to the host. They are kept in memory until the copy has run."""
        return lambda: tuple(tensor.numpy() for tensor in tensors)

    def mirror(self, array: NDArray[Any]) -> DeviceMirror:
        """Return a mirror of [rows, width], equal to the array as it is now."""
        return DeviceMirror(array)

    def launch(self, function: Callable[[], object]) -> None:
        """Run torch operations in the order of kernels. The function must not read values on the host."""
        function()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host on the device, when it has arrived. For weights."""
        return tensor.to(self.where)

    def now(self) -> DeviceTime:
        """Return the point in time after everything enqueued so far."""
        return past(time.monotonic())

    def memory(self) -> DeviceMemory | None:
        """None for the host, whose memory other processes share."""
        return None

    def free(self) -> None:
        """Return memory that torch has reserved and does not use."""


def _signed(column: NDArray[Any]) -> NDArray[Any]:
    return column.view(np.int64) if column.dtype == np.uint64 else column
