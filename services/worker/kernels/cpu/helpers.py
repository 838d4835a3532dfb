"""Helper threads that share the items of a kernel; the caller never waits for a helper that has not started.

OpenMP ends a kernel with a barrier, and a step has some dozens of them. If another process runs on one of the cores,
each barrier waits until the thread of that core is scheduled: on two cores, one of them busy with another process, a
step takes three times as long as without threads. Here the caller takes items until none are left, then waits only for
the helpers that are inside the kernel. A helper that starts later computes nothing. A helper without a core therefore
costs nothing, and the result of an item does not depend on the thread that computes it.

A helper without work yields its core repeatedly, and sleeps after some milliseconds.
"""

import ctypes
import signal
import threading
import weakref

import numpy as np
from numba import cfunc, njit
from numba.core import types
from numpy.typing import NDArray

from services.process import name_this_thread
from services.worker.kernels.cpu.compiled import raw

LINE = 64
"""Bytes of a cache line. Words that different threads write lie in different lines."""
TURN, FUNCTION, BLOCK, LEAVE = 0, 8, 16, 24
"""Byte offsets of int64 in the state: number, function and argument block of the kernel, and whether helpers end."""
POST, WAIT, YIELD = 32, 40, 48
"""Byte offsets of the addresses of `sem_post`, `sem_wait` and `sched_yield`."""
INSIDE = LINE
"""Number of helpers inside the kernel, plus OPEN while they may enter."""
ASLEEP = 2 * LINE
"""Number of helpers that sleep or are about to."""
SEMAPHORE = 3 * LINE
SIZE = 4 * LINE
OPEN = 1 << 32
PATIENCE = 5000
"""Number of times that a helper yields before it sleeps: a few milliseconds, so that it stays awake from step to step.
A helper that wakes up may be scheduled on its caller's core; the system moves it only after some milliseconds."""
HASTE = 100
"""Number of times that the caller checks for the end of the last helper before it yields its core to it."""


def _help(state):  # type: ignore[no-untyped-def]
    seen = 0
    while True:
        yielded = 0
        while raw.load_i64(state + TURN) == seen:
            if yielded < PATIENCE:
                raw.call(raw.load_i64(state + YIELD), 0)
                yielded += 1
                continue
            raw.fetch_add(state + ASLEEP, 1)
            # If the turn has changed, the caller may not have seen that this helper sleeps, and may not wake it
            if raw.load_i64(state + TURN) == seen:
                raw.call(raw.load_i64(state + WAIT), state + SEMAPHORE)
            yielded = 0
        seen = raw.load_i64(state + TURN)
        if raw.load_i64(state + LEAVE) != 0:
            return
        if raw.fetch_add(state + INSIDE, 1) >= OPEN:
            raw.call(raw.load_i64(state + FUNCTION), raw.load_i64(state + BLOCK))
        raw.fetch_add(state + INSIDE, -1)


@njit(types.void(types.int64, types.int64, types.int64), cache=True, nogil=True)
def share(function, block, state):  # type: ignore[no-untyped-def]
    """Call a kernel with its argument block, shared with the helpers that have this state."""
    raw.store_i64(state + FUNCTION, function)
    raw.store_i64(state + BLOCK, block)
    raw.fetch_add(state + INSIDE, OPEN)
    raw.fetch_add(state + TURN, 1)
    asleep = raw.load_i64(state + ASLEEP)
    if asleep > 0:
        raw.fetch_add(state + ASLEEP, -asleep)
        for _ in range(asleep):
            raw.call(raw.load_i64(state + POST), state + SEMAPHORE)
    raw.call(function, block)
    raw.fetch_add(state + INSIDE, -OPEN)
    looked = 0
    while raw.load_i64(state + INSIDE) != 0:
        looked += 1
        if looked > HASTE:
            raw.call(raw.load_i64(state + YIELD), 0)


_helping = cfunc(types.void(types.int64), nopython=True, cache=True)(_help)


class Helpers:
    """`number` helper threads of one calling thread. They end with this object. Only on Linux, whose C
    libraries have semaphores for threads."""

    def __init__(self, number: int) -> None:
        self.number = number
        memory = np.zeros(SIZE + LINE, np.uint8)
        self.state = _state(memory)
        libc = ctypes.CDLL(None)
        libc.sem_init(ctypes.c_void_p(self.state + SEMAPHORE), 0, 0)
        for at, name in ((POST, "sem_post"), (WAIT, "sem_wait"), (YIELD, "sched_yield")):
            _word(self.state + at).value = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0
        threads = [
            threading.Thread(target=_serve, args=(self.state,), name="kernels", daemon=True) for _ in range(number)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _leave, memory, threads)


def _serve(state: int) -> None:
    """Runs without the lock of the interpreter. Signals are blocked: they belong to the thread that handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name_this_thread()
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(_helping.address)(state)


def _state(memory: NDArray[np.uint8]) -> int:
    """Address of the first cache line in `memory`."""
    return -(-memory.ctypes.data // LINE) * LINE


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _leave(memory: NDArray[np.uint8], threads: list[threading.Thread]) -> None:
    """End the threads, so that none uses `memory` any more."""
    state = _state(memory)
    _word(state + LEAVE).value = 1
    _word(state + TURN).value += 1
    post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_word(state + POST).value)
    for _ in threads:
        post(state + SEMAPHORE)
    for thread in threads:
        thread.join()
