"""Runs compiled kernels on torch's own OpenMP threads.

A second pool of threads beside torch's would spin on the same cores while torch computes, and the other way round.
So a kernel is a C function of one address, handed to the OpenMP library that torch has loaded; every thread of the
team calls it, and each takes the next items from the counter at that address until none are left.
"""

import copy
import ctypes
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numba import cfunc, njit
from numba.core import types

from services.worker.backends.native.kernels.simd import fetch_add

HEADER = [("next", np.int64), ("items", np.int64), ("grain", np.int64)]
"""First fields of every argument block: the counter, how many items there are, how many a thread takes at once."""


@njit(inline="always")
def take(address, grain):  # type: ignore[no-untyped-def]
    """The first of the next `grain` items."""
    return fetch_add(address, grain)


def _openmp() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the library in this process; None where torch has another."""
    try:
        parallel = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _openmp()
PARALLEL: int = 0 if _parallel is None else ctypes.cast(_parallel, ctypes.c_void_p).value or 0
"""Its address, for kernels that call others; 0: there is none."""


class Kernel:
    """A compiled kernel and its argument block, for one calling thread.

    Args:
        body: `body(address)` in numba's subset of Python; `address` is that of the argument block.
        fields: names and types of its arguments, after `HEADER`; pointers are int64.
        cost: how many items are worth waking a thread for.
    """

    def __init__(self, body: Callable[[int], None], fields: list[tuple[str, Any]], cost: int) -> None:
        self._compiled = cfunc(types.void(types.int64), nopython=True, cache=True)(body)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._compiled.address)
        self.function: int = self._compiled.address
        self.fields, self.cost = np.dtype(HEADER + fields, align=True), cost
        self._place()

    def _place(self) -> None:
        self._block = np.zeros(1, self.fields)
        self.address: int = self._block.ctypes.data
        self.args = self._block[0]

    def again(self) -> Self:
        """The same code with an argument block of its own."""
        other = copy.copy(self)
        other._place()
        return other

    def fill(self, values: tuple[Any, ...], items: int = 0, grain: int = 1) -> None:
        """Sets the argument block: the values of the fields, in order."""
        self._block[0] = (0, items, grain, *values)

    def run(self, items: int, values: tuple[Any, ...], grain: int = 1) -> None:
        """Runs over `items` items with the values of the fields, in order."""
        self.fill(values, items, grain)
        threads = torch.get_num_threads()
        if _parallel is None or threads == 1 or items < 2 * self.cost:
            self._call(self.address)
        else:
            _parallel(self.function, self.address, threads, 0)
