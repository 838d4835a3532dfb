"""Recorded kernels, replayed without Python in between: with few rows, Python would take more time than the kernels.

Each recorded call has a prepared argument block, whose addresses do not change. Only numbers of rows differ from run to
run; a call reads its number from the cell of its kind of rows.

Between sequences of kernels, a recording calls functions of the host.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray

from services.worker.kernels.cpu import thread_team
from services.worker.kernels.cpu.compiled import raw
from services.worker.kernels.cpu.helpers import share
from services.worker.kernels.cpu.thread_team import Kernel, arguments
from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.recording import Recording

T = TypeVar("T")
Cell = NDArray[np.int64]
"""int64[1]: a number of rows."""
_CALL = np.dtype(
    [
        ("function", np.int64),
        ("block", np.int64),
        ("rows", np.int64),  # address of a `Cell`
        ("items", np.int64),  # for each `chunk` rows
        ("chunk", np.int64),
        ("rows_field", np.int64),  # address in the block that gets the number of rows, or 0
        ("cost", np.int64),
    ]
)
REPLAY = arguments(
    ("calls", np.int64),  # _CALL[number]
    ("number", np.int64),
    ("helpers", np.int64),  # see `thread_team.helper_state`
)
Function = Callable[[torch.Tensor], torch.Tensor]


@njit(inline="always")
def run(calls, number, state):  # type: ignore[no-untyped-def]
    """Run recorded calls in order. `state`: of the helpers, as `thread_team.helper_state` returns it."""
    every = carray(raw.pointer(calls), (number,), _CALL)
    for i in range(number):
        one = every[i]
        rows = raw.i64_at(one.rows, 1)[0]
        header = raw.i64_at(one.block, 2)
        header[0], header[1] = 0, one.items * ((rows + one.chunk - 1) // one.chunk)
        if one.rows_field != 0:
            raw.i64_at(one.rows_field, 1)[0] = rows
        if state == 0 or one.items * rows < 2 * one.cost:
            raw.call(one.function, one.block)
        else:
            share(one.function, one.block, state)


def replay_kernel() -> Kernel:
    """Runs a whole sequence. Other threads may share its kernels."""

    def replay(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, REPLAY)[0]
        run(a.calls, a.number, a.helpers)

    return Kernel(replay, REPLAY, cost=1)


class Sequence:
    """Recorded kernels that follow one another. For one calling thread."""

    def __init__(self) -> None:
        self._kernels: list[Kernel] = []
        self._calls = np.empty(0, _CALL)
        self._replay = replay_kernel()
        self._filled: tuple[int, ...] = ()

    def add(self, own: Kernel, rows: Cell, items: int, chunk: int, rows_field: int) -> None:
        """Append a call of a kernel, whose argument block is the call's own. The numbers are those of `_CALL`."""
        call = np.array([(own.function, own.address, rows.ctypes.data, items, chunk, rows_field, own.cost)], _CALL)
        self._kernels.append(own)
        self._calls = np.concatenate((self._calls, call))

    @property
    def calls(self) -> tuple[int, int]:
        """Address and number of the calls; valid until another call is added."""
        return self._calls.ctypes.data, len(self._calls)

    def run(self) -> None:
        values = *self.calls, thread_team.helper_state()
        if values != self._filled:
            self._replay.fill(values)
            self._filled = values
        self._replay.call()


class HostCall:
    """A function of the host inside a recording. `x`, `out`: buffers."""

    def __init__(self, function: Function, x: torch.Tensor, out: torch.Tensor, rows: Cell) -> None:
        self._function, self._x, self._out, self._rows = function, x, out, rows

    def run(self) -> None:
        rows = int(self._rows[0])
        self._out[:rows] = self._function(self._x[:rows])


class CpuRecording(Recording[T]):
    """Sequences of kernels, and between them functions of the host. `add` and `call` make it."""

    result: T
    """Set when everything is recorded."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._cells = {kind: np.zeros(1, np.int64) for kind in buffers.capacity}
        self._parts: list[Sequence | HostCall] = []

    def add(
        self, kernel: Kernel, counted: torch.Tensor, values: tuple[Any, ...], items: int, chunk: int, field: str
    ) -> None:
        """Append a copy of a kernel with an argument block of its own; see `Launcher.launch`."""
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, Sequence):
            self._parts.append(last := Sequence())
        own = kernel.again()
        own.fill(values)
        last.add(own, self._cell(counted), items, chunk, own.address_of(field) if field else 0)

    def call(self, function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
        """Append a call of the host, whose result is copied to `out`."""
        self._parts.append(HostCall(function, x, out, self._cell(x)))

    def _cell(self, counted: torch.Tensor) -> Cell:
        return self._cells[self._buffers.kind_of(counted)]

    def run(self, **counts: int) -> T:
        for kind, count in counts.items():
            self._cells[kind][0] = count
        for part in self._parts:
            part.run()
        return self.result

    def single(self, kind: str) -> tuple[int, int, int]:
        """Return the arguments of the kernel that runs this recording: address and number of its calls, cell of `kind`.

        Raises: ValueError, when the recording calls functions of the host.
        """
        if len(self._parts) != 1 or not isinstance(sequence := self._parts[0], Sequence):
            raise ValueError("a kernel can only run a recording of kernels")
        return (*sequence.calls, self._cells[kind].ctypes.data)
