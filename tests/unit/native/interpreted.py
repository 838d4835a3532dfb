"""The kernels for CUDA devices under Triton's interpreter: the same source, computed by NumPy on the processor.

bfloat16 is not tested so: the interpreter's products of it are garbage.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.kernels import CudaKernels

T = TypeVar("T")

if triton.knobs.runtime.interpret:
    # The interpreter puts its operations in the place of the language's at every call of a function in a kernel, which
    # takes most of its time. Here it does so once: this process compiles nothing.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # noqa: SLF001
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # noqa: SLF001
    # It asserts only in debug mode that no integer overflows, but computes each sum and product in int64 for that.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    # It makes a table of all types for each value.
    make_numpy_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()  # noqa: SLF001

    def numpy_type(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = make_numpy_type(kind)
        return numpy_types[kind.name]

    interpreter._get_np_dtype = numpy_type  # noqa: SLF001


class CopyingDevice(ComputeDevice):
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
    return CudaKernels(dtype, CopyingDevice(), graphs=None if graphs is None else lambda: graphs)
