"""Memory that the tensor-parallel ranks of one machine share, and the exchange of equal messages through it.

Each rank has an area with a header and two buffers. An exchange has a number; a rank writes its message into the buffer
of that number's parity, stores the number in its header and wakes the others, which sleep in a futex. When it has read
the number in every other header, all messages are there. A buffer is rewritten two exchanges later. By then every
other rank has stored the number in between, so it has read the message.

The memory is an anonymous file (memfd): it has no name that a killed rank could leave behind. Rank 0 creates it, and
the others open it through rank 0's entry in /proc. Ranks that cannot, because they are on another machine or in another
container, exchange messages through gloo. So do processors whose stores another core may see in another order.
"""

import ctypes
import errno
import mmap
import os
import platform
import secrets
import select
import threading
import weakref
from contextlib import suppress
from typing import Any, Self

import torch

from services.worker.runner import RanksLost

CAPACITY = 1 << 23
"""Maximum size of a message, bytes. The system allocates only pages that are written."""
_LINE = 64
_AREA = _LINE + 2 * CAPACITY
_NONCE = 16
"""Bytes at the beginning of the memory that prove that two ranks have mapped the same one."""
NUMBERS = 1 << 30
"""Numbers of exchanges begin again at 0 behind this many."""
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_PATIENCE = _Timespec(0, 100_000_000)
"""Time between two checks for a lost rank while a message is awaited."""
_libc = ctypes.CDLL(None, use_errno=True)
_futex = _libc.syscall
_futex.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
)
_futex.restype = ctypes.c_long


def is_supported() -> bool:
    """Return whether this system has what `SharedMemory` needs: Linux on x86-64, which keeps the order of stores."""
    return platform.machine() == "x86_64" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class SharedMemory:
    """The memory of one group, as one rank sees it. For one calling thread; `abort` may be called by any.

    Args:
        memory: the mapped file, of `size_of(size)` bytes.
        processes: pidfds of the other ranks' processes; owned.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, processes: list[int]) -> None:
        self.rank, self.size = rank, size
        self._aborted = threading.Event()
        self._number = 0
        areas = [_LINE + rank * _AREA for rank in range(size)]
        self._numbers = [ctypes.c_int32.from_buffer(memory, at) for at in areas]
        self._left = [ctypes.c_int32.from_buffer(memory, at + 4) for at in areas]
        """Not 0: the rank has left, or was aborted."""
        self._buffers = [
            [
                torch.frombuffer(memory, dtype=torch.uint8, count=CAPACITY, offset=at + _LINE + k * CAPACITY)
                for k in range(2)
            ]
            for at in areas
        ]
        self._ended = select.poll()
        for process in processes:
            self._ended.register(process, select.POLLIN)
        weakref.finalize(self, _leave, self._left[rank], self._numbers[rank], processes)

    @classmethod
    def join(cls, store: Any, rank: int, size: int) -> Self | None:
        """Map the memory of a group. Every rank of the group must call it.

        Args:
            store: a `torch.distributed.Store` of this group alone.

        Returns: None, if any rank cannot map the memory; the same on every rank.
        """
        file, memory, description = -1, None, ""
        processes = list[int]()
        try:
            if rank == 0:
                with suppress(OSError):  # the system refuses it; the others must not wait
                    file, description = _create(size)
                store.set("memory", description)
            with suppress(OSError):
                memory = _open(store.get("memory").decode(), size)
            store.set(f"process{rank}", str(os.getpid()))
            others = [int(store.get(f"process{other}")) for other in range(size) if other != rank]
            with suppress(OSError):
                for pid in others if memory is not None else ():
                    processes.append(os.pidfd_open(pid))
            store.set(f"mapped{rank}", str(len(processes)))
            complete = all(int(store.get(f"mapped{other}")) == size - 1 for other in range(size))
        finally:
            if file >= 0:
                os.close(file)
        if memory is not None and complete:
            return cls(memory, rank, size, processes)
        for process in processes:
            os.close(process)
        return None

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` of every rank, in the order of ranks. This rank's own is not copied; the others are views of the
        memory, valid until the next exchange begins.

        Args:
            x: contiguous, at most CAPACITY bytes; shapes and dtypes are equal on all ranks.

        Raises: RanksLost
        """
        if self._aborted.is_set():
            raise RanksLost("the epoch has ended")
        number = self._number = (self._number + 1) % NUMBERS
        count, half = x.nbytes, number % 2
        own = self._numbers[self.rank]
        self._buffers[self.rank][half][:count].copy_(x.view(-1).view(torch.uint8))
        own.value = number
        _wake(own)
        parts = []
        for rank in range(self.size):
            if rank == self.rank:
                parts.append(x)
            else:
                self._wait(rank, number)
                parts.append(self._buffers[rank][half][:count].view(x.dtype).view(x.shape))
        return parts

    def _wait(self, rank: int, number: int) -> None:
        """Wait until a rank has stored this number; it may have stored the next one already. The thread sleeps without
        the interpreter's lock.

        Raises: RanksLost
        """
        word = self._numbers[rank]
        while ((found := word.value) - number) % NUMBERS > 1:
            if self._left[rank].value:
                raise RanksLost("another rank has left the epoch")
            if self._aborted.is_set():
                raise RanksLost("the epoch ended while ranks waited for one another")
            if _sleep(word, found) and self._ended.poll(0) and word.value == found:
                raise RanksLost("the process of another rank has ended")

    def abort(self) -> None:
        """Make the present and every later wait of this rank and of the others raise RanksLost. May be called from any
        thread."""
        self._aborted.set()
        self._left[self.rank].value = 1
        for word in self._numbers:
            _wake(word)


def size_of(size: int) -> int:
    """Return the bytes of a group of `size` ranks."""
    return _LINE + size * _AREA


def _create(size: int) -> tuple[int, str]:
    """Return a file and its description for `_open`; -1 and "" where such files are not supported.

    Raises: OSError
    """
    if not is_supported():
        return -1, ""
    file, nonce = os.memfd_create("runahead", os.MFD_CLOEXEC), secrets.token_bytes(_NONCE)
    try:
        os.ftruncate(file, size_of(size))
        os.pwrite(file, nonce, 0)
    except OSError:
        os.close(file)
        raise
    return file, f"{os.getpid()} {file} {nonce.hex()}"


def _open(description: str, size: int) -> mmap.mmap | None:
    """Map a file of rank 0. Return None, if there is none, or that process has another file of this number.

    Raises: OSError
    """
    if not description or not is_supported():
        return None
    pid, number, nonce = description.split()
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(file).st_size != size_of(size) or os.pread(file, _NONCE, 0).hex() != nonce:
            return None
        return mmap.mmap(file, size_of(size))
    finally:
        os.close(file)


def _leave(left: ctypes.c_int32, number: ctypes.c_int32, processes: list[int]) -> None:
    left.value = 1
    _wake(number)
    for process in processes:
        os.close(process)


def _sleep(word: ctypes.c_int32, value: int) -> bool:
    """Sleep while the word has this value, until it is woken. Return True, if the time is over."""
    address, patience = ctypes.addressof(word), ctypes.addressof(_PATIENCE)
    result = _futex(_SYS_FUTEX, address, _FUTEX_WAIT, value, patience, None, 0)
    return bool(result) and ctypes.get_errno() == errno.ETIMEDOUT


def _wake(word: ctypes.c_int32) -> None:
    """Wake every thread, of any process, that sleeps on the word."""
    _futex(_SYS_FUTEX, ctypes.addressof(word), _FUTEX_WAKE, _ALL, None, None, 0)
