"""The kernels for CUDA devices under Triton's interpreter: the same source, computed by NumPy on the processor.

bfloat16 is not tested so: the interpreter's products of it are garbage.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.device.cpu import CpuDevice
from services.worker.kernels.cuda.kernels import CudaKernels

T = TypeVar("T")


class CopyingDevice(CpuDevice):
    """The processor, except that uploads are copies, as on a device."""

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return super().upload(*(np.array(column) for column in columns))


class CountedGraphs:
    """`CudaGraphs` whose graphs call the function again."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        self.captures += 1

        def replay() -> T:
            self.replays += 1
            return function()

        return replay

    def free_memory(self) -> int:
        """Each graph takes 1 KiB."""
        return (1000 - self.captures) * 1024


def interpreted_kernels(dtype: torch.dtype = torch.float32, graphs: CountedGraphs | None = None) -> CudaKernels:
    return CudaKernels(dtype, dtype, CopyingDevice(), graphs=None if graphs is None else lambda: graphs)
