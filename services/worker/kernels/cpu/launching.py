"""Launch of a kernel: immediately, or as the next call of a recording."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from services.worker.kernels.cpu.recording import CpuRecording, Function
from services.worker.kernels.cpu.thread_team import Kernel
from services.worker.kernels.interface.buffers import B

T = TypeVar("T")


class Launcher:
    """For one calling thread."""

    _recording: CpuRecording[Any] | None = None

    def launch(
        self,
        kernel: Kernel,
        counted: torch.Tensor,
        values: tuple[Any, ...],
        items: int = 1,
        chunk: int = 1,
        field: str = "",
    ) -> None:
        """Run `kernel` over the rows of `counted` with `values` for its fields, now or in the recording.

        Args:
            items: for each `chunk` rows, or part of it
            field: the field of the kernel that is the number of rows; empty: none
        """
        if self._recording is not None:
            self._recording.add(kernel, counted, values, items, chunk, field)
        else:
            rows = len(counted)
            kernel.run(items * -(-rows // chunk), values, items * rows)

    def call(self, function: Function, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Call a function of the host now, and return its result; or in the recording, which copies it to `out`."""
        if self._recording is None:
            return function(x)
        self._recording.call(function, x, out)
        return out

    def record(self, body: Callable[[B], T], buffers: B) -> CpuRecording[T]:
        self._recording = recording = CpuRecording[T](buffers)
        try:
            recording.result = body(buffers)
        finally:
            self._recording = None
        return recording
