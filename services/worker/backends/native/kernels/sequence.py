"""Kernels that run one after another without coming back to Python in between: for few rows that is most of their time.

Each has its argument block prepared, with addresses that stay; only the number of rows differs from run to run.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels import simd
from services.worker.backends.native.kernels.team import Kernel

_CALL = np.dtype(
    [
        ("function", np.int64),
        ("block", np.int64),
        ("items", np.int64),  # of each `chunk` rows
        ("chunk", np.int64),
        ("rows_at", np.int64),  # where the block wants to be told how many rows there are, or 0
        ("cost", np.int64),
    ]
)


class Sequence:
    """A list of kernels and their arguments, for one calling thread."""

    def __init__(self) -> None:
        self._kernels: list[Kernel] = []
        self._calls = np.empty(0, _CALL)

    def add(
        self, kernel: Kernel, values: tuple[Any, ...], items: int = 1, chunk: int = 1, rows: str | None = None
    ) -> Kernel:
        """`kernel` with `values` for its fields.

        Args:
            items: for each `chunk` rows, or part of it.
            rows: name of the field that is the number of rows.

        Returns:
            The kernel with its own argument block, of which some may still be changed.
        """
        own = kernel.again()
        own.fill(values)
        at = own.address + own.fields.fields[rows][1] if rows else 0  # type: ignore[index]
        call = np.array([(own.function, own.address, items, chunk, at, own.cost)], _CALL)
        self._kernels.append(own)
        self._calls = np.concatenate((self._calls, call))
        return own

    @property
    def values(self) -> tuple[int, int]:
        """Where its calls are and how many, as long as nothing more is added."""
        return self._calls.ctypes.data, len(self._calls)


@njit(inline="always")
def run(calls, number, rows, share, among):  # type: ignore[no-untyped-def]
    """Runs a `Sequence` over so many rows; the last two are what `team.shared` says."""
    every = carray(simd.pointer(calls), (number,), _CALL)
    for i in range(number):
        one = every[i]
        items = one.items * ((rows + one.chunk - 1) // one.chunk)
        header = simd.i64_at(one.block, 2)
        header[0], header[1] = 0, items
        if one.rows_at != 0:
            simd.i64_at(one.rows_at, 1)[0] = rows
        if share == 0 or one.items * rows < 2 * one.cost:
            simd.call(one.function, one.block)
        else:
            simd.call_shared(share, one.function, one.block, among)
