"""Compiled kernels, run by the calling thread alone or shared with others.

A kernel is a C function of one address. Every thread that shares it calls the function, and takes items from the
counter at that address until none are left.
"""

import copy
import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numba import cfunc, njit
from numba.core import types

from services.worker.kernels.cpu.compiled.raw import fetch_add
from services.worker.kernels.cpu.helpers import Helpers, share

ADDRESS = np.int64
"""Type of a pointer in an argument block."""
HEADER = ("next", np.int64), ("items", np.int64)
"""First fields of every argument block: the counter, and the number of items."""
Field = tuple[str, type[np.generic]]


def arguments(*fields: Field) -> "np.dtype[np.void]":
    """Return the type of a kernel's argument block, from names and types of its arguments."""
    return np.dtype([*HEADER, *fields], align=True)


@njit(inline="always")
def take(address):  # type: ignore[no-untyped-def]
    """Take the next item."""
    return fetch_add(address, 1)


@njit
def items(address, number):  # type: ignore[no-untyped-def]
    """Take items, one at a time, until none of the `number` items are left."""
    item = take(address)
    while item < number:
        yield item
        item = take(address)


class _ThreadHelpers(threading.local):
    """The helpers of each calling thread."""

    helpers: Helpers | None = None


_own = _ThreadHelpers()
_threads = 1


def set_num_threads(number: int) -> None:
    """Set the number of threads of each kernel in this process, including the calling thread."""
    global _threads
    _threads = number if sys.platform == "linux" else 1


def helper_state() -> int:
    """Return the state of the calling thread's helpers (`helpers.share`); 0: it has none."""
    if not (others := _threads - 1):
        return 0
    if _own.helpers is None or _own.helpers.number != others:
        _own.helpers = None  # they leave first
        _own.helpers = Helpers(others)
    return _own.helpers.state


_compiled: dict[tuple[object, ...], Any] = {}
"""A body's code and the values that it refers to -> numba's cfunc.

Each model and drafter of a process makes its kernels, and numba reads a kernel from its files in 5 to 10 ms.
"""


def compiled(body: Callable[[int], None]) -> Any:
    """Return numba's cfunc of a body: compiled, read from the compile cache, or made before by this process."""
    values = [cell.cell_contents for cell in body.__closure__ or ()]
    key = (body.__code__, *values, *map(type, values))
    if key not in _compiled:
        if not _compiled:
            collect_failures()
        _compiled[key] = cfunc(types.void(types.int64), nopython=True, cache=True)(body)
    return _compiled[key]


_last_failure: BaseException | None = None
"""Last error that a kernel has raised. A C function cannot raise: numba passes its errors to the hook, on the thread
that ran it, and its caller continues with wrong results. Helpers run kernels of any caller, so an error fails all
kernels that run meanwhile."""


def collect_failures() -> None:
    """Store the errors of kernels from now on."""
    other_hook = sys.unraisablehook

    def collect(unraisable: "sys.UnraisableHookArgs") -> None:
        global _last_failure
        error = unraisable.exc_value
        if error is not None and isinstance(raised_in := unraisable.object, str) and raised_in.startswith("<numba."):
            _last_failure = error
        else:
            other_hook(unraisable)

    sys.unraisablehook = collect


class Kernel:
    """A compiled kernel and its argument block. For one calling thread.

    Args:
        body: `body(address)` in numba's subset of Python; `address` is that of the argument block.
        arguments: of the block, as the function `arguments` returns it
        cost: smallest amount of work for which another thread is used, in items or in the unit of `run`'s `work`.
    """

    def __init__(self, body: Callable[[int], None], arguments: "np.dtype[np.void]", cost: int) -> None:
        self._compiled = compiled(body)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._compiled.address)
        self.function: int = self._compiled.address
        self.cost, self._arguments = cost, arguments
        self.renew_arguments()

    def renew_arguments(self) -> None:
        """Allocate a new argument block."""
        self._block = np.zeros(1, self._arguments)
        self.address: int = self._block.ctypes.data
        self.args = self._block[0]

    def again(self) -> Self:
        """Return the same code with another argument block."""
        other = copy.copy(self)
        other.renew_arguments()
        return other

    def address_of(self, field: str) -> int:
        """Return the address of a field of the argument block."""
        offset = self._block.dtype.fields[field][1]  # type: ignore[index]
        return self.address + int(offset)

    def call(self) -> None:
        """Run on the calling thread with the present argument block. Raises: what a kernel has raised"""
        before = _last_failure
        self._call(self.address)
        if _last_failure is not before:
            raise self._failure()

    def fill(self, values: tuple[Any, ...], items: int = 0) -> None:
        """Set the argument block to the values of the fields, in order."""
        self._block[0] = (0, items, *values)

    def run(self, items: int, values: tuple[Any, ...], work: int = 0) -> None:
        """Run over `items` items with the values of the fields, in order. `work`: the amount of work; 0: the items.

        Raises: what a kernel has raised
        """
        self.fill(values, items)
        before = _last_failure
        if (work or items) >= 2 * self.cost and (state := helper_state()):
            share(self.function, self.address, state)
        else:
            self._call(self.address)
        if _last_failure is not before:
            raise self._failure()

    def _failure(self) -> BaseException:
        assert _last_failure is not None
        error = copy.copy(_last_failure)  # one that was raised refers to the frames it passed
        error.add_note(f"raised in {self._compiled}, or in a kernel that it ran")
        return error
