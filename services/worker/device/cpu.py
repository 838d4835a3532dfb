"""The processor as a device: every operation is complete when its call returns."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.device.device_times import DeviceTime, past
from services.worker.device.interface import I32, DeviceMirror, HostCopy

HOST = torch.device("cpu")


class CpuDevice:
    """`ComputeDevice`"""

    where = HOST
    is_host = True

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self) -> None:
        """Do nothing: no copy is ever pending."""

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(_signed(column)) for column in columns)

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        return lambda: tuple(tensor.numpy() for tensor in tensors)

    def mirror(self, array: NDArray[Any]) -> DeviceMirror:
        return SharedArray(torch.from_numpy(array))

    def launch(self, function: Callable[[], object]) -> None:
        function()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def now(self) -> DeviceTime:
        return past(time.monotonic())

    def memory(self) -> None:
        return None

    def free(self) -> None:
        """Do nothing: torch reserves no memory of the host."""


def _signed(column: NDArray[Any]) -> NDArray[Any]:
    return column.view(np.int64) if column.dtype == np.uint64 else column


@dataclass(frozen=True)
class SharedArray:
    """`DeviceMirror` in the array's own memory."""

    tensor: torch.Tensor

    def update(self, *rows: I32 | Sequence[int]) -> None:
        """Do nothing: the memory is the same."""
